"""Which layouts of many GPUs fit, and which of them is the fastest by its costs.

Layouts are priced as if all responses fitted into the caches at once, which is a bound on their speed, and tried in
this order: the memory plan of each says whether it fits and how large its caches are, which gives its time. The search
ends when no layout that is left can be faster.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.config import PPOConfig
from posttrain.config.schema import assign, lookup
from posttrain.config.trainer import COLOCATED_WORKERS, ENGINE_STAGES, ROLLOUT_WORKERS
from posttrain.engine.megatron.groups import ParallelSizes, check_sizes
from posttrain.engine.megatron.model import check_model
from posttrain.engine.megatron.package import MegatronError
from posttrain.engine.megatron.settings import NAME as MEGATRON_NAME
from posttrain.engine.megatron.settings import MegatronSettings, megatron_settings
from posttrain.engine.ranks import RanksError
from posttrain.errors import UserError, first_line
from posttrain.models.decodable import can_decode_fast
from posttrain.models.shards import check_heads
from posttrain.planning import megatron_ranks
from posttrain.planning.budgets import set_cache_size
from posttrain.planning.fleet.costs import Layout, Pricing, StepCosts, most_each
from posttrain.planning.fleet.inputs import TEAMS
from posttrain.planning.memory_plan import USABLE, Device, Plan, Planner, shown
from posttrain.rollout.engine_kwargs import OUTSIDE
from posttrain.rollout.native.build import check_can_cut

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CHECKPOINTING, STRATEGY = f"{MODEL}.enable_gradient_checkpointing", f"{ACTOR}.strategy"
ENGINE, TENSOR, MEGATRON = f"{ROLLOUT}.name", f"{ROLLOUT}.tensor_model_parallel_size", f"{ACTOR}.megatron_config"
NODES, EACH, ONE_STEP_OFF = (f"trainer.{name}" for name in ("nnodes", "n_gpus_per_node", "one_step_off"))
CACHE = (f"{ROLLOUT}.kv_cache_gb", f"{ROLLOUT}.gpu_memory_utilization")
CUTS = ("tensor", "pipeline", "context", "expert")
MOST = 400  # memory plans of a search: each takes milliseconds


@dataclass(frozen=True)
class Tried:
    """A layout with its memory plan; `problem` says why it cannot be used."""

    layout: Layout
    costs: StepCosts
    plan: Plan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of a run with this layout
    problem: str = ""


@dataclass
class Found:
    """Fitting layouts by kind (colocated, separate, one step ahead), the fastest of each; and what did not fit."""

    best: dict[str, Tried] = field(default_factory=dict)
    rejected: list[Tried] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)  # why something was not tried -> what
    ahead: bool = False  # whether generating ahead was asked for

    @property
    def chosen(self) -> Tried | None:
        """The fastest that leaves the algorithm as it is; one step ahead only if it was asked for."""
        fitting = [tried for kind, tried in self.best.items() if self.ahead or kind != AHEAD]
        return min(fitting, key=lambda tried: tried.costs.seconds) if fitting else None


COLOCATED, DISAGGREGATED, AHEAD = "colocated", "separate", "separate, one step ahead"


class Search:
    """Of layouts for `gpus` GPUs in machines of `machine`; settings in `explicit` stay as they are. `check` says why a
    run rejects the settings of a layout, and is empty if it does not."""

    def __init__(
        self,
        config: PPOConfig,
        explicit: set[str],
        planner: Planner,
        device: Device,
        pricing: Pricing,
        check: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self.config, self.explicit, self.planner, self.device, self.pricing = config, explicit, planner, device, pricing
        self.check = check
        self.ahead = config.trainer.one_step_off or config.trainer.max_staleness > 0
        self.found = Found()

    def run(self, gpus: int) -> Found:
        self.found = Found(ahead=self.ahead)
        kinds = [AHEAD] if self.ahead else [COLOCATED, DISAGGREGATED]  # workers that train cannot generate ahead
        if not (self.ahead or self._fixed(ONE_STEP_OFF) or self._fixed("trainer.max_staleness")):
            kinds.append(AHEAD)  # shown beside the others
        for kind in kinds:
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
        for training, generating in self._splits(gpus, kind):
            each = self._each(training, gpus)
            if not each:
                continue
            ahead = max(1, self.config.trainer.max_staleness) if kind == AHEAD else 0
            colocated = 0 if generating else self.config.actor_rollout_ref.rollout.colocated_workers
            for engine, ranks in self._engines(generating or colocated or training):
                for sizes in self._cuts(training):
                    for checkpointing in self._either(CHECKPOINTING):
                        layout = Layout(training=training, generating=generating, checkpointing=checkpointing, **sizes)
                        layout = replace(layout, engine=engine, rollout_tensor=ranks, ahead=ahead)
                        yield replace(layout, colocated=colocated, each=each)

    def _splits(self, gpus: int, kind: str) -> list[tuple[int, int]]:
        """GPUs that train, and those that only generate."""
        given = self.config.actor_rollout_ref.rollout.n_workers if self._fixed(ROLLOUT_WORKERS) else None
        if kind == COLOCATED:
            return [] if given else [(gpus, 0)]
        if given == 0 or (given is None and self.config.actor_rollout_ref.rollout.colocated_workers):
            return []
        if given is not None:
            if given >= gpus:
                self._note(f"{ROLLOUT_WORKERS}={given}", f"none of {gpus} GPUs is left to train")
            return [(gpus - given, given)] if given < gpus else []
        unit = self.pricing.machine if gpus >= 2 * self.pricing.machine else 1
        parts = {gpus // 4 // unit * unit, gpus // 2 // unit * unit, gpus * 3 // 4 // unit * unit}
        if gpus == 1 and self.ahead:
            self._note("generating ahead", "one GPU cannot train and generate at the same time")
        return [(gpus - part, part) for part in sorted(parts) if 0 < part < gpus]

    def _each(self, training: int, gpus: int) -> int:
        """GPUs of a machine that train; 0 if they cannot be spread evenly over the machines, or not as was asked."""
        trainer, machine = self.config.trainer, self.pricing.machine
        nodes = trainer.nnodes if self._fixed(NODES) else None
        each = trainer.n_gpus_per_node if self._fixed(EACH) else None
        if each is None:
            each = most_each(training, machine) if nodes is None else training // nodes
        machines = math.ceil(gpus / machine) if nodes is None else nodes
        needed = training // each if 0 < each <= machine and training % each == 0 else 0
        if needed and (needed <= machines if nodes is None else needed == nodes):
            return each
        asked = ", ".join(f"{key}={lookup(self.config, key)}" for key in (NODES, EACH) if self._fixed(key))
        over = asked or f"{machines} machines of {machine}"
        self._note(f"{training} GPUs that train", f"they cannot be spread evenly over {over}")
        return 0

    def _engines(self, gpus: int) -> Iterator[tuple[str, int]]:
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.pipeline_model_parallel_size > 1:
            self._note("rollout in stages", f"their steps have no price here: compare layouts with {ENGINE_STAGES}=1")
            return
        names = [rollout.name] if self._fixed(ENGINE) else ["native", "vllm"]
        sizes = [rollout.tensor_model_parallel_size] if self._fixed(TENSOR) else TEAMS
        for name in names:
            for size in sizes:
                within = gpus <= self.pricing.machine or self.pricing.machine % size == 0
                if size > min(gpus, self.pricing.machine) or gpus % size or not within:
                    continue
                if problem := self._cannot_split(name, size):
                    self._note(f"rollout {name} tensor {size}", problem)
                else:
                    yield name, size

    def _cannot_split(self, name: str, size: int) -> str:
        if size == 1:
            return ""
        if name in OUTSIDE and not OUTSIDE[name].by_teams:
            return "an engine over several devices is not built"
        return self.planner.count(self.config, self.device, "actor", _splitting_problem, name, size)

    def _cuts(self, training: int) -> Iterator[dict[str, Any]]:
        given = self.config.actor_rollout_ref.actor.strategy if self._fixed(STRATEGY) else None
        cuts = self._megatron_cuts(training) if given == MEGATRON_NAME or (given is None and training > 1) else []
        if given is None and cuts and self.pricing.model.experts:
            gathered = shown(2 * self.pricing.model.weights)
            self._note("fsdp", f"not tried for a mixture, of which every pass would gather {gathered} on each GPU")
        elif given != MEGATRON_NAME:
            yield {"strategy": given or "fsdp"}
        yield from cuts

    def _megatron_cuts(self, training: int) -> list[dict[str, Any]]:
        count = self.planner.count
        if problem := count(self.config, self.device, "actor", _megatron_problem):
            self._note(MEGATRON_NAME, problem)
            return []
        given = megatron_settings(self.config.actor_rollout_ref.actor.megatron_config)
        cuts = count(self.config, self.device, "actor", _possible_cuts, training, given, self._given_cuts())
        if not cuts:
            self._note(f"{MEGATRON_NAME} on {training} GPUs", "the model cannot be cut into the given sizes")
        return [{"strategy": MEGATRON_NAME, **cut} for cut in cuts]

    def _given_cuts(self) -> frozenset[str]:
        """Sizes that were set."""
        given = self.config.actor_rollout_ref.actor.megatron_config
        return frozenset(name for name in CUTS if f"{name}_parallel_size" in given)

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
        settings = settings_of(layout, machine, self.config)
        for key, value in settings.items():
            assign(config, key, value)
        longest = self.pricing.work.prompt + self.pricing.work.longest
        set_cache_size(config, self.device, self.planner.plan)
        plan = self.planner.plan(config, self.device)
        if not plan.fits:
            needed, room = shown(plan.peak()), shown(int(USABLE * self.device.bytes))
            return Tried(layout, bound, plan, problem=f"{plan.worst} takes {needed} of {room}")
        cache = plan.stages["generate"]["KV cache"]
        model, ranks = self.pricing.model, layout.rollout_tensor
        slots = int(cache // (longest * model.cached(ranks, layout.engine) + model.state / ranks))
        if slots < 1:
            return Tried(layout, bound, plan, problem=f"the {shown(cache)} left for the cache hold no response")
        settings |= {key: value for key in CACHE if (value := lookup(config, key)) is not None}
        layout = replace(layout, slots=slots)
        return Tried(layout, self.pricing.of(layout), plan, settings, self.check(settings))


def settings_of(layout: Layout, machine: int, config: PPOConfig) -> dict[str, Any]:
    """The settings of a run with this layout; those of Megatron with what `config` gives of them."""
    each = layout.each or most_each(layout.training, machine)
    chosen: dict[str, Any] = {
        NODES: layout.training // each,
        EACH: each,
        STRATEGY: layout.strategy,
        CHECKPOINTING: layout.checkpointing,
        ENGINE: layout.engine,
        TENSOR: layout.rollout_tensor,
    }
    if layout.generating:
        chosen[ROLLOUT_WORKERS] = layout.generating
    if layout.colocated:
        chosen[COLOCATED_WORKERS] = layout.colocated
    if layout.ahead and not config.trainer.max_staleness:
        chosen[ONE_STEP_OFF] = True
    if layout.by_ranks:
        sizes = {f"{name}_parallel_size": getattr(layout, name) for name in CUTS}
        given = config.actor_rollout_ref.actor.megatron_config
        chosen[MEGATRON] = {**given, **{name: size for name, size in sizes.items() if size > 1 or name in given}}
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
        check_model(model.config, ParallelSizes())
    except MegatronError as error:
        return first_line(error)
    return ""


def _possible_cuts(model: Any, workers: int, given: MegatronSettings, fixed: frozenset[str]) -> list[dict[str, int]]:
    """Sizes that this model and so many workers allow; those in `fixed` are the given ones."""
    stay = {name: getattr(given, f"{name}_parallel_size") for name in fixed}
    virtual = given.virtual_pipeline_parallel_size or 1
    found: list[dict[str, int]] = []
    for cut in megatron_ranks.possible_cuts(model, ParallelSizes(virtual=virtual), workers):
        sizes = {name: stay.get(name, cut.get(f"{name}_parallel_size", 1)) for name in CUTS}
        ranks = ParallelSizes(sizes["tensor"], sizes["pipeline"], virtual, sizes["expert"], sizes["context"])
        if sizes | {"virtual": virtual} not in found and _allows(model, ranks, workers):
            found.append(sizes | {"virtual": virtual})
    return found


def _allows(model: Any, sizes: ParallelSizes, workers: int) -> bool:
    if sizes.virtual > 1 and sizes.pipeline == 1:
        return False
    try:
        check_sizes(sizes, workers)
        check_model(model.config, sizes)
    except (MegatronError, RanksError):
        return False
    return True
