"""Train engines by the name in `actor_rollout_ref.actor.strategy` (RL) or `fsdp.strategy` (supervised training).

An entry says what a run must know of an engine before torch is imported and a model is loaded: which settings it reads
and rejects, and how the memory plan counts it. The classes of the built-in ones are in `engine/registry.py`, which is
above this package.

A train engine of your own, in the file that `model.external_lib` names:

    from posttrain.config.train_engines import register_train_engine

    @register_train_engine("counting")
    class CountingEngine(TrainEngine): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError

if TYPE_CHECKING:
    from posttrain.config.checked import Checked, Finding
    from posttrain.config.problem import Problem
    from posttrain.config.resolved import Resolved


@dataclass(frozen=True)
class RoleKeys:
    """Settings of one model that an engine trains."""

    model: str
    sequence_size: str
    fsdp_size: str


@dataclass(frozen=True)
class EngineKeys:
    """Where a tree of settings chooses its train engine."""

    section: str
    roles: dict[str, RoleKeys]
    """The models that the engine trains, the main one first."""

    @property
    def strategy(self) -> str:
        return f"{self.section}.strategy"

    @property
    def model(self) -> str:
        return next(iter(self.roles.values())).model


_ACTOR = "actor_rollout_ref.actor"
RL = EngineKeys(
    _ACTOR,
    {
        "actor": RoleKeys(
            "actor_rollout_ref.model", f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.fsdp_size"
        ),
        "critic": RoleKeys("critic.model", "critic.ulysses_sequence_parallel_size", "critic.fsdp_config.fsdp_size"),
    },
)
SUPERVISED = EngineKeys("fsdp", {"model": RoleKeys("model", "fsdp.ulysses_sequence_parallel_size", "fsdp.fsdp_size")})


@dataclass(frozen=True)
class TrainEngineEntry:
    """One registered engine."""

    engine: Any = None
    """A class that implements `posttrain.engine.base.TrainEngine`; None for those that are built in."""
    own_settings: str | None = None
    """The dict beside `strategy` that only this engine reads."""
    check: Callable[[Checked, EngineKeys], Iterator[Finding]] | None = None
    """Findings about settings; called for every run, whichever engine it chose."""
    check_environment: Callable[[Resolved, Path, EngineKeys], Iterator[Problem]] | None = None
    """Problems with packages and model files, for runs that chose this engine."""
    loads_on_host: bool = False
    """Whether even a single process loads a model to host memory, for the engine to take its part from there."""
    plan_note: str | None = None
    """A sentence for the memory plan, where it does not count this engine exactly."""


ENGINES: dict[str, TrainEngineEntry] = {name: TrainEngineEntry() for name in ("fsdp", "fsdp2")}


def register_train_engine(name: str, **facts: Any) -> Callable[[Any], Any]:
    """Make an engine known under a name, as a decorator of its class. `facts` are further fields of
    `TrainEngineEntry`. A name that another class has is an error."""

    def add(kind: Any) -> Any:
        if name in ENGINES and not _is_same(ENGINES[name].engine, kind):
            raise ValueError(f"there is a train engine called {name!r} already")
        ENGINES[name] = TrainEngineEntry(kind, **facts)
        return kind

    return add


def _is_same(one: Any, other: Any) -> bool:
    """Whether a class is registered again; a second run in one process loads the user's file anew."""
    names = [(getattr(kind, "__module__", None), getattr(kind, "__qualname__", kind)) for kind in (one, other)]
    return names[0] == names[1]


def train_engine(name: str, keys: EngineKeys) -> TrainEngineEntry:
    """The entry of a name. A module of the user's, which may register it, has been imported."""
    if name not in ENGINES:
        raise UserError(
            f"{keys.strategy}={name}: there is no such train engine; known: {', '.join(ENGINES)}. One of your own is "
            f'made known by @register_train_engine("{name}") in the module that {keys.model}.external_lib names'
        )
    return ENGINES[name]


def engine_names(keys: EngineKeys, config: Any) -> dict[str, tuple[str, ...]]:
    """The setting that chooses an engine and the names that it takes: any where the user's module is still to come."""
    section, model = _at(config, keys.section), _at(config, keys.model)
    own = () if model.external_lib is None else (section.strategy,)
    return {keys.strategy: tuple(dict.fromkeys((*ENGINES, *own)))}


def check_train_engines(checked: Checked, keys: EngineKeys = RL) -> Iterator[Finding]:
    """What engines say of the settings of a run."""
    for entry in ENGINES.values():
        if entry.check is not None:
            yield from entry.check(checked, keys)


def check_engine_environment(resolved: Resolved, cwd: Path, keys: EngineKeys = RL) -> Iterator[Problem]:
    """What the chosen engine misses on this machine."""
    entry = ENGINES.get(resolved.value(keys.strategy))
    if entry is not None and entry.check_environment is not None:
        yield from entry.check_environment(resolved, cwd, keys)


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
