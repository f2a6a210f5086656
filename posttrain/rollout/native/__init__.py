"""The native engine: continuous batching over the trainer's own weights."""

from posttrain.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
