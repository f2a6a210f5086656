"""The policy's update with verl's interface."""

from verl._missing import not_given
from verl.workers.actor.dp_actor import DataParallelPPOActor

__all__ = ["DataParallelPPOActor"]
__getattr__ = not_given(__name__)
