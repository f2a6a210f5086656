"""verl's address of the train engines: posttrain's contract and its torch implementation."""

from posttrain.workers.engine import EngineSettings, FSDPEngine, TrainEngine

BaseEngine = TrainEngine
__all__ = ["BaseEngine", "EngineSettings", "FSDPEngine", "TrainEngine"]
