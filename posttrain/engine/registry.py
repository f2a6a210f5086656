"""From a configuration to a train engine: the layout that it asks for, and the registered class that builds it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

import posttrain.engine.megatron.entry  # noqa: F401 - it registers its engine
from posttrain.config.schema import lookup
from posttrain.engine.base import EngineLayout, EngineSettings, TrainEngine
from posttrain.engine.heads import Head
from posttrain.engine.ranks import world_size
from posttrain.engine.settings import EngineKeys, train_engine

_TORCH = ("posttrain.engine.torch_engine", "TorchEngine")
# Strategy -> (module, class), imported when a run chooses it. `engine/settings.py` has what settings know.
BUILT_IN = {"fsdp": _TORCH, "fsdp2": _TORCH, "megatron": ("posttrain.engine.megatron.engine", "MegatronEngine")}


def layout_of(config: Any, keys: EngineKeys, role: str) -> EngineLayout:
    """How the model of a role is held; all roles of a run have the engine of `keys.strategy`."""
    section, sizes = lookup(config, keys.section), keys.roles[role]
    own = train_engine(section.strategy, keys).own_settings
    return EngineLayout(
        section.strategy,
        keys,
        lookup(config, sizes.fsdp_size),
        lookup(config, sizes.sequence_size),
        getattr(section, own) if own else {},
    )


def engine_class(layout: EngineLayout) -> type[TrainEngine]:
    entry = train_engine(layout.strategy, layout.keys)
    if entry.engine is not None:
        return entry.engine
    module, name = BUILT_IN[layout.strategy]
    return getattr(importlib.import_module(module), name)


def loading_device(layout: EngineLayout, device: torch.device) -> torch.device:
    """Where a model is loaded to: engines that hold a part of it take that part from host memory."""
    in_parts = world_size() > 1 or train_engine(layout.strategy, layout.keys).loads_on_host
    return torch.device("cpu") if in_parts else device


def build_train_engine(
    module: torch.nn.Module, settings: EngineSettings, layout: EngineLayout, head: Head | None = None
) -> TrainEngine:
    """The engine of `layout.strategy` over a loaded model."""
    return engine_class(layout).create(module, settings, layout, head)
