"""Train engines: rows packed to a token budget, an injected loss, one optimizer step per mini-batch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.engine.base import TrainEngine

__all__ = ["TrainEngine"]


def __getattr__(name: str) -> Any:
    """`TrainEngine` imports torch, and `settings.py` is imported to check a configuration, which must not."""
    if name == "TrainEngine":
        from posttrain.engine.base import TrainEngine

        return TrainEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
