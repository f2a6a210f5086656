"""Engines over one tiny model, in a chosen type and layout."""

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.loading import load_causal_lm


@pytest.fixture(scope="session")
def base_model(tiny_model):
    return lambda dtype: load_causal_lm(ModelConfig(path=str(tiny_model)), dtype=dtype, device=torch.device("cpu"))


@pytest.fixture
def make_engine(base_model):
    def make(dtype=torch.float64, **settings) -> TorchEngine:
        defaults = {"device": torch.device("cpu"), "optim": OptimConfig(lr=1e-3), "grad_clip": 1e9}
        return TorchEngine(base_model(dtype), EngineSettings(**{**defaults, **settings}))

    return make


@pytest.fixture(scope="session")
def engines(base_model):
    """`engines(dtype, layout)`: one engine of each kind for all tests that change no weights; building takes time."""
    built: dict[tuple, TorchEngine] = {}

    def engine(dtype: torch.dtype, layout: dict) -> TorchEngine:
        key = (dtype, *sorted(layout.items()))
        if key not in built:
            settings = EngineSettings(device=torch.device("cpu"), optim=OptimConfig(lr=1e-3), grad_clip=1e9, **layout)
            built[key] = TorchEngine(base_model(dtype), settings)
        return built[key]

    return engine
