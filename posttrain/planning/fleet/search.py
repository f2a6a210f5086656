"""Which layouts of many GPUs fit, and which of them is the fastest by its costs.

Layouts are priced as if all responses fitted into the caches at once, which is a bound on their speed, and tried in
this order: the memory plan of each says whether it fits and how large its caches are, which gives its time. The search
ends when no layout that is left can be faster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import PPOConfig
from posttrain.config.schema import assign
from posttrain.engine.megatron.groups import ParallelSizes
from posttrain.engine.megatron.model import check_model
from posttrain.engine.megatron.package import MegatronError
from posttrain.errors import UserError, first_line
from posttrain.models.decodable import can_decode_fast
from posttrain.models.shards import check_heads
from posttrain.planning import megatron_ranks
from posttrain.planning.budgets import set_cache_size
from posttrain.planning.fleet.costs import Layout, Pricing, StepCosts
from posttrain.planning.memory_plan import USABLE, Device, Plan, Planner, shown
from posttrain.rollout.native.build import check_can_cut

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CHECKPOINTING, STRATEGY = f"{MODEL}.enable_gradient_checkpointing", f"{ACTOR}.strategy"
ENGINE, TENSOR, MEGATRON = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size", f"{ACTOR}.megatron_config"
SEPARATE = f"{ROLLOUT}.n_workers"
MOST = 400  # memory plans of a search: each takes milliseconds


@dataclass(frozen=True)
class Tried:
    """A layout with its memory plan; `problem` says why it cannot be used."""

    layout: Layout
    costs: StepCosts
    plan: Plan | None = None
    config: PPOConfig | None = None
    problem: str = ""


@dataclass
class Found:
    """Fitting layouts by kind (colocated, separate, one step ahead), the fastest of each; and what did not fit."""

    best: dict[str, Tried] = field(default_factory=dict)
    rejected: list[Tried] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)  # why something was not tried -> what

    @property
    def chosen(self) -> Tried | None:
        """The fastest that leaves the algorithm as it is; one step ahead only if it was asked for."""
        fitting = [tried for kind, tried in self.best.items() if kind != AHEAD]
        return min(fitting, key=lambda tried: tried.costs.seconds) if fitting else None


COLOCATED, APART, AHEAD = "colocated", "separate", "separate, one step ahead"


class Search:
    """Of layouts for `gpus` GPUs in machines of `machine`; settings in `explicit` stay as they are."""

    def __init__(
        self, config: PPOConfig, explicit: set[str], planner: Planner, device: Device, pricing: Pricing
    ) -> None:
        self.config, self.explicit, self.planner, self.device, self.pricing = config, explicit, planner, device, pricing
        self.found = Found()

    def run(self, gpus: int) -> Found:
        self.found = Found()
        for kind in (COLOCATED, APART, AHEAD):
            self._best_of(kind, self._layouts(gpus, kind))
        return self.found

    def _best_of(self, kind: str, layouts: Iterator[Layout]) -> None:
        bounds = sorted(((self.pricing.of(layout), layout) for layout in layouts), key=lambda one: one[0].seconds)
        best: Tried | None = None
        for bound, layout in bounds[:MOST]:
            if best is not None and bound.seconds >= best.costs.seconds:
                break
            tried = self.try_layout(layout, bound)
            if tried.problem:
                self.found.rejected.append(tried)
            elif best is None or tried.costs.seconds < best.costs.seconds:
                best = tried
        if best is not None:
            self.found.best[kind] = best

    # -- what there is to try -----------------------------------------------------------------------------------------
    def _layouts(self, gpus: int, kind: str) -> Iterator[Layout]:
        given = self.config.trainer.one_step_off or self.config.trainer.max_staleness > 0
        if kind == COLOCATED:
            splits = [] if self._fixed(SEPARATE) else [(gpus, 0)]
        else:
            splits = self._splits(gpus)
        if kind == APART and given:
            return
        for training, generating in splits:
            for engine, ranks in self._engines(generating or training):
                for sizes in self._cuts(training):
                    for checkpointing in self._either(CHECKPOINTING):
                        layout = Layout(training=training, generating=generating, checkpointing=checkpointing, **sizes)
                        layout = replace(layout, engine=engine, rollout_tensor=ranks, ahead=kind == AHEAD)
                        yield layout

    def _splits(self, gpus: int) -> list[tuple[int, int]]:
        if self._fixed(SEPARATE):
            generating = self.config.actor_rollout_ref.rollout.n_workers or 0
            return [(gpus - generating, generating)] if 0 < generating < gpus else []
        unit = self.pricing.machine if gpus >= 2 * self.pricing.machine else 1
        parts = {gpus // 4 // unit * unit, gpus // 2 // unit * unit, gpus * 3 // 4 // unit * unit}
        return [(gpus - part, part) for part in sorted(parts) if 0 < part < gpus]

    def _engines(self, gpus: int) -> Iterator[tuple[str, int]]:
        rollout = self.config.actor_rollout_ref.rollout
        names = [rollout.name] if self._fixed(ENGINE) else ["native", "vllm"]
        sizes = [rollout.tensor_model_parallel_size] if self._fixed(TENSOR) else [1, 2, 4, 8]
        for name in names:
            for size in sizes:
                if size > min(gpus, self.pricing.machine) or gpus % size:
                    continue
                if problem := self._cannot_split(name, size):
                    self._note(f"rollout {name} tensor {size}", problem)
                else:
                    yield name, size

    def _cannot_split(self, name: str, size: int) -> str:
        return (
            "" if size == 1 else self.planner.count(self.config, self.device, "actor", _splitting_problem, name, size)
        )

    def _cuts(self, training: int) -> Iterator[dict[str, Any]]:
        strategies = [self.config.actor_rollout_ref.actor.strategy] if self._fixed(STRATEGY) else ["fsdp", "megatron"]
        model = self.pricing.model
        if "megatron" not in strategies or training == 1:
            strategies = strategies[:1]
        if len(strategies) > 1 and model.experts:
            gathered = shown(2 * model.weights)
            self._note("fsdp", f"not tried for a mixture, of which every pass would gather {gathered} on each GPU")
            strategies = ["megatron"]
        if "megatron" not in strategies:
            yield {"strategy": strategies[0]}
            return
        if "fsdp" in strategies:
            yield {"strategy": "fsdp"}
        count = self.planner.count
        if problem := count(self.config, self.device, "actor", _megatron_problem):
            self._note("megatron", problem)
            return
        for cut in count(self.config, self.device, "actor", _possible_cuts, training):
            sizes = {name.removesuffix("_parallel_size"): size for name, size in cut.items()}
            yield {"strategy": "megatron", "gathers": False, **sizes}

    def _either(self, key: str) -> tuple[bool, ...]:
        return (
            (bool(self.config.actor_rollout_ref.model.enable_gradient_checkpointing),)
            if self._fixed(key)
            else (False, True)
        )

    def _fixed(self, key: str) -> bool:
        return key in self.explicit

    def _note(self, what: str, why: str) -> None:
        named = self.found.notes.setdefault(why, [])
        if what not in named:
            named.append(what)

    # -- whether it fits ----------------------------------------------------------------------------------------------
    def try_layout(self, layout: Layout, bound: StepCosts) -> Tried:
        """The layout with its memory plan, and its costs with the caches that this leaves."""
        config, machine = copy.deepcopy(self.config), self.pricing.machine
        for key, value in settings_of(layout, machine).items():
            assign(config, key, value)
        rollout, longest = config.actor_rollout_ref.rollout, self.pricing.work.prompt + self.pricing.work.longest
        set_cache_size(config, self.device, self.planner.plan)
        plan = self.planner.plan(config, self.device)
        if not plan.fits:
            needed, room = shown(plan.peak()), shown(int(USABLE * self.device.bytes))
            return Tried(layout, bound, plan, config, f"{plan.worst} takes {needed} of {room}")
        cache = plan.stages["generate"]["KV cache"]
        slots = int(cache // (longest * self.pricing.model.cached(rollout.tensor_model_parallel_size)))
        if slots < 1:
            return Tried(layout, bound, plan, config, f"the {shown(cache)} left for the cache hold no response")
        layout = replace(layout, slots=slots)
        return Tried(layout, self.pricing.of(layout), plan, config)


def settings_of(layout: Layout, machine: int) -> dict[str, Any]:
    """The settings of a run with this layout."""
    nodes, each = divmod(layout.training, machine)
    chosen: dict[str, Any] = {
        "trainer.nnodes": nodes if nodes and not each else 1,
        "trainer.n_gpus_per_node": machine if nodes and not each else layout.training,
        STRATEGY: layout.strategy,
        CHECKPOINTING: layout.checkpointing,
        ENGINE: layout.engine,
        TENSOR: layout.rollout_tensor,
    }
    if layout.generating:
        chosen[SEPARATE] = layout.generating
    if layout.ahead:
        chosen["trainer.one_step_off"] = True
    if not layout.gathers:
        sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "expert")}
        chosen[MEGATRON] = {f"{name}_parallel_size": size for name, size in sizes.items() if size > 1}
    return chosen


def _splitting_problem(model: Any, name: str, size: int) -> str:
    try:
        check_heads(model.config.get_text_config(), size)
        if name == "native":
            check_can_cut(model, can_decode_fast(model), size)
    except UserError as error:
        return first_line(error).partition(": ")[2].partition("; ")[0]  # without the setting, which was tried here
    return ""


def _megatron_problem(model: Any) -> str:
    try:
        check_model(model.config, ParallelSizes(1, 1, 1, 1, 1, False))
    except MegatronError as error:
        return first_line(error)
    return ""


def _possible_cuts(model: Any, workers: int) -> list[dict[str, int]]:
    return megatron_ranks.possible_cuts(model, ParallelSizes(1, 1, 1, 1, 1, False), workers)
