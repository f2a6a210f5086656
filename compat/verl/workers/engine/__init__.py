"""verl's address of the train engines: posttrain's contract and its torch implementation."""

from posttrain.workers.engine import EngineSettings, FSDPEngine, TrainEngine
from verl._missing import not_given

BaseEngine = TrainEngine
__all__ = ["BaseEngine", "EngineSettings", "FSDPEngine", "TrainEngine"]
__getattr__ = not_given(__name__)
