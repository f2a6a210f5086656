"""Front door to the train engines: the contract and its torch implementation."""

from posttrain.engine.base import TrainEngine
from posttrain.engine.fsdp import EngineSettings, FSDPEngine

__all__ = ["EngineSettings", "FSDPEngine", "TrainEngine"]
