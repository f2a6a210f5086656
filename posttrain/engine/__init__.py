"""Train engines: rows packed to a token budget, an injected loss, one optimizer step per mini-batch."""

from posttrain.engine.base import TrainEngine

__all__ = ["TrainEngine"]
