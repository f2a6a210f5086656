"""Train engines by the name in `actor_rollout_ref.actor.strategy` (RL) or `fsdp.strategy` (supervised training).

An entry says what a run must know of an engine before torch is imported and a model is loaded: which settings it reads
and rejects, and how the memory plan counts it. The classes of the built-in ones are in `engine/registry.py`,
imported when a run chooses one.

A train engine of your own, in the file that `model.external_lib` names:

    from posttrain.engine.settings import register_train_engine

    @register_train_engine("counting")
    class CountingEngine(TrainEngine): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding, check_choice
from posttrain.config.resolved import Problem, Resolved
from posttrain.config.schema import lookup
from posttrain.errors import UserError


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
_NOT_BUILT: dict[tuple[str, str], str] = {
    (RL.strategy, "deepspeed"): "DeepSpeed is not used here: `fsdp2` shards the same state (weights, gradients, "
    "optimizer); set actor_rollout_ref.actor.strategy=fsdp2",
    **{
        (RL.strategy, name): "this engine is not built in this version; set actor_rollout_ref.actor.strategy=fsdp2"
        for name in ("veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")
    },
}
"""(setting, engine of another system) -> the answer that it gets here."""
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
    sizes: Callable[[Any], Any] | None = None
    """From an `EngineLayout`, how this engine cuts a model over ranks (`engine/megatron/groups.py`: `ParallelSizes`),
    for the memory plan; None shares everything over all workers, as FSDP does."""
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


def keys_of(config: Any) -> EngineKeys:
    """Where this tree chooses its train engine."""
    return RL if hasattr(config, "actor_rollout_ref") else SUPERVISED


def check(checked: Checked) -> Iterator[Finding]:
    """The engine's name, and what all engines say of the settings of a run."""
    keys = keys_of(checked.config)
    if lookup(checked.config, keys.model).external_lib is None:  # a module of the user's may register any name
        own = f" (one of your own needs @register_train_engine in the file that {keys.model}.external_lib names)"
        yield from check_choice(checked, keys.strategy, tuple(ENGINES), _NOT_BUILT, own)
    for entry in ENGINES.values():
        if entry.check is not None:
            yield from entry.check(checked, keys)


def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]:
    """What the chosen engine misses on this machine."""
    keys = keys_of(resolved.config)
    entry = ENGINES.get(resolved.value(keys.strategy))
    if entry is not None and entry.check_environment is not None:
        yield from entry.check_environment(resolved, folder, keys)
