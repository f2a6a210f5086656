"""Import paths that users' files may still have, for modules that have moved.

`from posttrain.rollout.tools.base import Tool` in a user's file gives the module `posttrain.conversations.tools.base`
itself, so that classes and registries are the same ones. A finder does this rather than files at the old places: those
would make a package import one that is above it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old name -> new name; modules below it move along.
MOVED = {
    "posttrain.algorithms.calling": "posttrain.algorithms.registry",
    "posttrain.batch.rows": "posttrain.batch.columns",
    "posttrain.config.data": "posttrain.config.trainer",
    "posttrain.config.declared": "posttrain.config.schema",
    "posttrain.config.reward": "posttrain.config.rollout",
    "posttrain.config.train_engines": "posttrain.engine.settings",
    "posttrain.conversations.batch": "posttrain.conversations.loop",
    "posttrain.other_systems.verl.algorithm": "posttrain.other_systems.verl.rollout",
    "posttrain.other_systems.verl.written": "posttrain.other_systems.verl.rule",
    "posttrain.other_systems.verl_script.report": "posttrain.other_systems.verl_script.command",
    "posttrain.rollout.agents": "posttrain.conversations",
    "posttrain.rollout.agents.registry": "posttrain.conversations.agents",
    "posttrain.rollout.proof": "posttrain.rollout.engines",
    "posttrain.rollout.settings": "posttrain.rollout.sampling",
    "posttrain.rollout.tools": "posttrain.conversations.tools",
    "posttrain.trainer.config.algorithm": "posttrain.config.root",
    "posttrain.trainer.ppo.worker_groups": "posttrain.trainer.ppo.parts",
    "posttrain.trainer.run.snapshots": "posttrain.trainer.run.recovery",
    "posttrain.workers.engine_worker": "posttrain.workers.roles",
    "posttrain.workers.weight_sync": "posttrain.workers.policy",
}


class _MovedModules:
    """Finds the new module under an old name."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if new_name(name) else None  # pyright: ignore

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(new_name(spec.name) or spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # Python has set the old name's; the module keeps its own


def new_name(name: str) -> str | None:
    """Where a module is now; None for one that has not moved."""
    old = max((one for one in MOVED if f"{name}.".startswith(f"{one}.")), key=len, default=None)
    return None if old is None else MOVED[old] + name[len(old) :]


def install() -> None:
    """First of all finders: Python's own would load a second copy of a module below a package that has moved."""
    sys.meta_path.insert(0, _MovedModules())
