"""What all memory plans share: the device, the parts of each stage, and models that are counted once.

A plan adds up what lies in memory at the worst moment of each stage. Weights, gradients and optimizer state are exact;
activations and temporary tensors come from the model's own code on the meta device (`counting.py`), for the largest
micro-batch that the settings allow.

`find_remedies` names settings that would lower a peak. Each is tried by planning again with it, because their effects
depend on each other: with LoRA, say, offloading the optimizer saves little.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.config.schema import Section, assign, lookup
from posttrain.cores import machine_memory
from posttrain.engine.megatron.groups import ParallelSizes
from posttrain.engine.megatron.settings import SECTION
from posttrain.engine.registry import layout_of
from posttrain.engine.settings import keys_of, train_engine
from posttrain.errors import UserError, first_line
from posttrain.planning import megatron_ranks
from posttrain.planning.counting import ModelBytes

GIB = 2**30
WORKSPACES = 192 * 2**20  # measured on an H200: 32 MiB for each stream and library
USABLE = 0.9  # of the device; the rest goes to the CUDA context or the Python process, and to fragmentation


def shown(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Device:
    """What a worker runs on."""

    kind: str
    bytes: int
    words: str
    # Captured steps multiply by its matrix units. Not so of a GPU that is not here: others need more memory.
    hopper: bool = False

    @property
    def offloads(self) -> bool:
        """Host memory is another memory."""
        return self.kind == "cuda"


def find_device(config: Any, gpu_gb: float | None = None) -> Device:
    """A GPU of `gpu_gb` GiB, or the device that the run would have here."""
    wanted = config.trainer.device
    if gpu_gb is not None:
        if wanted == "cpu":
            raise UserError("--gpu_gb plans for a GPU, but trainer.device=cpu; leave one of them out")
        return Device("cuda", int(gpu_gb * GIB), f"a GPU of {gpu_gb:g} GiB")
    if wanted != "cpu" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return gpu_elsewhere(found.name, found.total_memory, is_hopper(torch.device("cuda", 0)))
    if wanted == "cuda":
        raise UserError(
            "trainer.device=cuda, but no GPU was found here; `posttrain plan --gpu_gb 80 ...` plans for one elsewhere"
        )
    size = machine_memory()
    return Device("cpu", size, f"the CPU, {size / GIB:.1f} GiB of host memory")


def gpu_elsewhere(name: str, size: int, hopper: bool) -> Device:
    """A GPU by what its own process says of it."""
    return Device("cuda", size, f"{name}, {size / GIB:.1f} GiB", hopper)


def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


class Planner(ABC):
    """Plans the memory of one kind of run, without its weights.

    Keeps the models that it built and the numbers that it counted: plans that differ in a few settings, as those of
    `find_remedies`, share most of them.
    """

    # Settings that memory depends on -> the next lower value, or None where there is none.
    lower: Mapping[str, Callable[[Any, Plan], Any]]
    always_named: Sequence[str]  # settings that are named with their values even where they change nothing

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    @abstractmethod
    def plan(self, config: Any, device: Device) -> Plan:
        """The plan of this configuration on that device."""

    @abstractmethod
    def identity(self, config: Any) -> tuple[Any, ...]:
        """Everything in the settings that the models follow from."""

    @abstractmethod
    def build(self, config: Any, device: Device, role: str) -> torch.nn.Module:
        """The role's model on the meta device."""

    def cuts(self, config: Any, role: str) -> ParallelSizes | None:
        """The sizes by which an engine other than FSDP cuts a role's model over the workers."""
        keys = keys_of(config)
        layout = layout_of(config, keys, role if role in keys.roles else next(iter(keys.roles)))
        sizes = train_engine(layout.strategy, keys).sizes
        return None if sizes is None else sizes(layout)

    def held(self, config: Any, device: Device, role: str, workers: int) -> ModelBytes:
        """What one worker holds of a role's model and optimizer; of unequal ones the most."""
        sizes = self.cuts(config, role)
        if sizes is None:
            return self.count(config, device, role, ModelBytes.of).over(workers)
        return self.count(config, device, role, megatron_ranks.held_bytes, sizes, workers)

    def count(self, config: Any, device: Device, role: str, what: Callable[..., Any], *args: Any) -> Any:
        """`what(model, *args)` of the role's model."""
        # Not the whole configuration: batch sizes and budgets change no model, and most plans differ in those alone.
        key = (*self.identity(config), device.kind, role)
        if key not in self._kept:
            self._kept[key] = self.build(config, device, role)
        if (key, what, args) not in self._kept:
            try:
                self._kept[key, what, args] = what(self._kept[key], *args)
            except RuntimeError as error:
                raise UserError(
                    f"The passes of {type(self._kept[key]).__name__} cannot be counted without weights: "
                    f"{first_line(error)}\n  Only the plan needs that; the run itself does without it."
                ) from error
        return self._kept[key, what, args]


def settings_of_weights(model: Any) -> str:
    """What a model's settings say of its weights; how its passes are made is an argument of each count."""
    return repr({**model.to_dict(), "enable_gradient_checkpointing": None})


Parts = dict[str, int]


@dataclass
class Plan:
    """Bytes of every part in every stage, on one worker's device."""

    device: Device
    shape: Any  # rows and tokens that meet in one worker's memory, with `workers` and `longest`
    stages: dict[str, Parts] = field(default_factory=dict)
    host: Parts = field(default_factory=dict)  # what offloading moves to host memory while it is not used
    saved: int = 0  # a checkpoint: trained weights in the optimizer's precision, and two moments

    def peak(self, stage: str | None = None) -> int:
        """Bytes at the worst moment of a stage, or of the whole step."""
        return max(sum(parts.values()) for name, parts in self.stages.items() if stage in (None, name))

    @property
    def worst(self) -> str:
        return max(self.stages, key=self.peak)

    @property
    def fits(self) -> bool:
        return self.peak() <= USABLE * self.device.bytes

    def verdict(self) -> str:
        usable = f"{shown(int(USABLE * self.device.bytes))} usable ({USABLE:.0%} of {self.device.words})"
        state = "fits" if self.fits else "does not fit"
        return f"It {state}: the peak, in {self.worst}, is {shown(self.peak())} of {usable}."

    def largest(self, part: str) -> int:
        """Most bytes of one part over the stages; 0 if no stage has it."""
        return max(parts.get(part, 0) for parts in self.stages.values())


def place(plan: Plan, part: str, size: int, only_in: tuple[str, ...] | None) -> None:
    """Put a part on the device in every stage, or in some, and in host memory otherwise."""
    moves = only_in is not None and plan.device.offloads
    for name, parts in plan.stages.items():
        parts[part] = size if not moves or name in (only_in or ()) else 0
    if moves:
        plan.host[part] = size


def add_workspaces(plan: Plan) -> None:
    """On a CUDA device the libraries of matrix products hold room of their own, in every stage."""
    if plan.device.kind == "cuda" and plan.device.bytes > 8 * WORKSPACES:
        for parts in plan.stages.values():
            parts["workspaces"] = WORKSPACES


def backward_parts(
    role: str, counted: tuple[int, int], held: ModelBytes, device: Device, *, single: bool, workers: int
) -> Parts:
    """The moment when the activations of the largest micro-batch are complete.

    `counted` is what `training_bytes` gave, `held` what one worker holds; `single`: the mini-batch is one micro-batch.
    """
    activations, peak = counted
    has_masters = held.optimizer > 2 * held.gradients
    # A single micro-batch's gradients go to the masters after its backward pass; several are summed during it, and a
    # CUDA device that has the model alone opens the sums before the first.
    opened = device.kind == "cuda" and workers == 1
    summed = 0 if has_masters and single and not opened else held.gradients
    return {
        f"{role} gradients": summed,
        f"{role} activations": activations,
        "temporary tensors": peak - activations,
    }


def step_parts(role: str, device: Device, held: ModelBytes) -> Parts:
    """The optimizer's step: on CUDA one kernel reads and writes all tensors in place, on the CPU it takes room."""
    temporary = 0 if device.kind == "cuda" else 2 * held.largest
    return {f"{role} gradients": held.gradients, "temporary tensors": temporary}


@dataclass(frozen=True)
class Remedy:
    """One setting, its present value, and what another value would do to a stage."""

    key: str
    present: Any
    value: Any
    stage: str
    saves: int

    def words(self) -> str:
        if self.saves <= 0:
            return f"{self.key}={self.present}: changes nothing here"
        return f"{self.key}={self.present}: with {self.value}, {self.stage} takes {shown(self.saves)} less"


def find_remedies(config: Section, plan: Plan, planner: Planner, stage: str | None = None) -> list[Remedy]:
    """What lowers this stage (or the worst) first, then what lowers others; settings without effect are left out."""
    first = stage or plan.worst
    found = list(_try_all(config, plan, planner, first))
    return sorted(found, key=lambda remedy: (remedy.stage != first, -remedy.saves))


@dataclass(frozen=True)
class Cut:
    """Sizes by which Megatron's ranks would hold the model, by their settings, and the peak that the plan then has."""

    sizes: dict[str, int]
    peak: int
    fits: bool

    def words(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items()) or "all sizes 1"
        return f"{sizes}: the peak is {shown(self.peak)}"


def find_cuts(config: Section, plan: Plan, planner: Planner, most: int = 3) -> list[Cut]:
    """Sizes that fit, those first that leave the most copies of the model; or the one with the lowest peak. Nothing
    where the engine is not cut by sizes."""
    keys = keys_of(config)
    role, section = next(iter(keys.roles)), f"{keys.section}.{SECTION}"
    given = planner.cuts(config, role)
    if given is None:
        return []
    allowed = planner.count(config, plan.device, role, megatron_ranks.possible_cuts, given, plan.shape.workers)
    others = {name: value for name, value in lookup(config, section).items() if not name.endswith("_parallel_size")}
    found = []
    for sizes in allowed:
        changed = copy.deepcopy(config)
        assign(changed, section, others | sizes)
        other = planner.plan(changed, plan.device)
        found.append(Cut(sizes, other.peak(), other.fits))

    def order(cut: Cut) -> tuple[int, int, int]:
        sharing = {name: size for name, size in cut.sizes.items() if name != "expert_parallel_size"}
        return math.prod(sharing.values()), sharing.get("pipeline_parallel_size", 1), cut.peak

    fitting = sorted((cut for cut in found if cut.fits), key=order)
    return fitting[:most] or [min(found, key=lambda cut: cut.peak)]


def _try_all(config: Section, plan: Plan, planner: Planner, first: str) -> Iterator[Remedy]:
    for key, lower in planner.lower.items():
        present = lookup(config, key)
        value = lower(present, plan)
        saves: dict[str, int] = {}
        if value is not None and value != present:
            changed = copy.deepcopy(config)
            assign(changed, key, value)
            other = planner.plan(changed, plan.device)
            saves = {stage: plan.peak(stage) - other.peak(stage) for stage in plan.stages}
        helped = {stage: saved for stage, saved in saves.items() if saved > 0}
        if helped or key in planner.always_named:
            stage = first if first in helped or not helped else max(helped, key=lambda name: helped[name])
            yield Remedy(key, present, value, stage, helped.get(stage, 0))
