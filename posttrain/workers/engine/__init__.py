"""Front door to the train engines: the contract and its torch implementation."""

from posttrain.engine.base import EngineSettings, TrainEngine
from posttrain.engine.torch_engine import FSDPEngine

__all__ = ["EngineSettings", "FSDPEngine", "TrainEngine"]
