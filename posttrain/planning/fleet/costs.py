"""What one step of a layout costs: seconds by stage, bytes that a GPU sends by purpose and link, busy resources.

Compute and traffic of a stage are added up, except for FSDP's gathering of weights, which overlaps with the passes.
Sequences are spread evenly; a copy of the model that gets one more than others decides. Reward functions, tools and
validation take no time here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from posttrain.engine.registry import train_engine
from posttrain.engine.settings import RL
from posttrain.planning.fleet.inputs import Constants, ModelCosts

BF16, FP32 = 2, 4
ROW_BYTES = 16  # of a token in the store: its id, and log-probs of rollout, old policy and reference
STEP_BYTES = 28  # of a trained weight in AdamW's step: gradient, master and two moments read, all but the first written
TAIL = 8  # once the other responses have ended, an eighth of the slots is busy until the longest ends


@dataclass(frozen=True)
class Work:
    """A step of GRPO or PPO."""

    prompts: int
    n: int
    mini: int  # prompts of an update
    prompt: int
    response: float  # mean tokens of a response
    longest: int  # tokens of the longest response
    budget: int  # tokens of a training pass
    slots: int  # `max_num_seqs`
    scoring: int  # passes without gradient over the batch: old log-probs, reference, values
    trained: int  # models that are updated: the actor, and a critic
    texts: bool  # reward functions read them
    gloo: bool
    merged: bool  # a 4-bit base: under LoRA whole weights are synced all the same
    epochs: int = 1  # passes of the updates over the batch
    micro: int = 0  # most sequences of a training pass; 0: as many as the budget holds
    greedy: int = 0  # further responses to a prompt, which are scored and not trained on

    @property
    def updates(self) -> int:
        """Optimizer steps of a model."""
        return math.ceil(self.prompts / self.mini) * self.epochs

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def _group(self) -> int:
        """Responses that share their prompt in a pass."""
        return max(1, min(self.n, self.micro or self.n, int((self.budget - self.prompt) // max(1.0, self.response))))

    @property
    def computed(self) -> float:
        """Training tokens of a sequence."""
        return self.response + self.prompt / self._group

    def passes(self, rows: int) -> int:
        """Passes over so many sequences: a pass holds whole groups, or one sequence at least."""
        groups = int(self.budget // (self._group * self.computed))
        groups = max(1, min(groups, self.micro // self._group if self.micro else groups))
        return math.ceil(rows / (groups * self._group))


@dataclass(frozen=True)
class Layout:
    """Which GPUs train and generate, and how models are cut over them."""

    strategy: str
    training: int
    generating: int = 0  # GPUs that only generate; 0: those that train do
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # chunks of layers of each pipeline stage
    context: int = 1
    expert: int = 1
    engine: str = "native"
    rollout_tensor: int = 1
    checkpointing: bool = False
    ahead: int = 0  # policy versions between generating and training: the next batch is generated while this one trains
    slots: int | None = None  # sequences that fit into an engine's cache; None: all
    colocated: int = 0  # of the GPUs that train, those that generate too; 0: all of them
    each: int = 0  # GPUs of a machine that train; 0: as many as the machine has and `training` allows

    @property
    def by_ranks(self) -> bool:
        """Whether the engine cuts a model over ranks; others share out all weights, as FSDP does."""
        return train_engine(self.strategy, RL).sizes is not None

    @property
    def copies(self) -> int:
        return self.training // (self.tensor * self.pipeline * self.context)

    @property
    def engines(self) -> int:
        return (self.generating or self.colocated or self.training) // self.rollout_tensor

    def words(self) -> str:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "expert": self.expert}
        cut = "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
        where = f"{self.training} train + {self.generating} generate" if self.generating else "colocated"
        where += f" ({self.colocated} of {self.training} generate)" if self.colocated else ""
        recomputing = ", checkpointing" if self.checkpointing else ""
        copies = f", {self.copies} {'copy' if self.copies == 1 else 'copies'}" if self.by_ranks else ""
        steps = "one step" if self.ahead == 1 else f"{self.ahead} steps"
        ahead = f", {steps} ahead" if self.ahead else ""
        engine = f"{self.engine} tensor {self.rollout_tensor}"
        return f"{where}: {self.strategy}{cut}{copies}{recomputing}; rollout {engine}{ahead}"


@dataclass
class StepCosts:
    """Of one step; bytes are those that the busiest GPU sends."""

    stages: dict[str, float] = field(default_factory=dict)
    sent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds at full rate, by resource
    ahead: bool = False

    @property
    def seconds(self) -> float:
        rollout, others = self.stages["rollout"], sum(self.stages.values()) - self.stages["rollout"]
        return max(rollout, others) if self.ahead else rollout + others

    def saturation(self) -> list[tuple[str, float]]:
        """Resources by the share of a step in which they work at their full rate."""
        return sorted(((name, busy / self.seconds) for name, busy in self.busy.items()), key=lambda one: -one[1])


class Pricing:
    """Prices layouts of one model and one kind of step."""

    def __init__(self, model: ModelCosts, work: Work, constants: Constants, machine: int) -> None:
        self.model, self.work, self.constants, self.machine = model, work, constants, machine

    def of(self, layout: Layout) -> StepCosts:
        costs = StepCosts(ahead=layout.ahead > 0)
        costs.stages["rollout"] = self._rollout(layout, costs)
        if self.work.scoring:
            costs.stages["log-probs"] = self.work.scoring * self._passes(layout, costs, trains=False)
        updates = self.work.updates
        costs.stages["update"] = self.work.trained * updates * self._passes(layout, costs, trains=True, times=updates)
        costs.stages["weight sync"] = self._sync(layout, costs)
        costs.stages["driver"] = self._driver(layout, costs)
        return costs

    # -- rollout ------------------------------------------------------------------------------------------------------
    def _rollout(self, layout: Layout, costs: StepCosts) -> float:
        work, model, c = self.work, self.model, self.constants
        rows = math.ceil(work.prompts * (work.n + work.greedy) / layout.engines)
        slots = max(1, min(rows, work.slots, layout.slots or rows))
        steps = rows * work.response / slots
        seconds = steps * self.decode_step(layout, slots, work.prompt + work.response / 2, costs, steps)
        if work.longest > steps:  # the longest responses continue when most slots are empty
            tail = work.longest - steps
            seconds += tail * self.decode_step(layout, max(1, slots // TAIL), work.prompt + work.longest, costs, tail)
        prefill = rows / (work.n + work.greedy) * (1 + work.greedy) * work.prompt
        flops = prefill * (2 * model.active + 2 * model.attending * model.queries * work.prompt) / layout.rollout_tensor
        costs.busy["matrix units"] += flops / c["peak_tflops"]
        return seconds + flops / (c["peak_tflops"] * c.by_width("update_share", model.narrow))

    def decode_step(self, layout: Layout, rows: int, context: float, costs: StepCosts, steps: float) -> float:
        """Seconds of one decode step of an engine; `steps` of them count as busy."""
        model, c, ranks = self.model, self.constants, layout.rollout_tensor
        # Weights are read once a step, of a mixture's experts those that some row goes to.
        touched = model.matrices - model.experts * (1 - model.chosen) ** rows
        flops, read = 2 * model.active * rows / ranks, BF16 * touched / ranks
        # Keys and values are read; states are read and written.
        kept = rows * (context * model.cached(ranks, layout.engine) + 2 * model.state / ranks)
        products = max(
            flops / (c["peak_tflops"] * c.by_width("decode_share", model.narrow)),
            read / (c["hbm_tb_s"] * c["weight_share"]),
        )
        hidden = rows * model.width * BF16
        layer = max(c["layer_us"], hidden * c["row_passes"] / c["hbm_tb_s"])
        if layout.engine == "native" and ranks > 1:
            layer = max(layer, c["launch_us"])
        seconds = products + kept / (c["hbm_tb_s"] * c["cache_share"]) + model.layers * layer
        if ranks > 1:
            sent = 2 * model.layers * 2 * hidden * (ranks - 1) / ranks
            seconds += 2 * model.layers * c["link_us"]
            seconds += self._send("rollout tensor parallel", costs, sent, ranks <= self.machine, steps)
        if layout.engine != "native":
            seconds = max(seconds * c["serving_ratio"], rows * c["serving_us"])
        costs.busy["matrix units"] += steps * flops / c["peak_tflops"]
        costs.busy["memory bandwidth"] += steps * (read + kept) / c["hbm_tb_s"]
        return seconds

    # -- passes of training -------------------------------------------------------------------------------------------
    def _passes(self, layout: Layout, costs: StepCosts, *, trains: bool, times: int = 1) -> float:
        """Seconds of one mini-batch with its optimizer step, or of a pass without gradient over the batch; `times` such
        count as busy and sent, for each model."""
        work, model, c = self.work, self.model, self.constants
        rows = math.ceil((min(work.mini, work.prompts) if trains else work.prompts) * work.n / layout.copies)
        tokens, times = rows * work.computed, times * (work.trained if trains else work.scoring)
        passes = work.passes(rows)
        factor = (4 if model.adapters else 6) + (2 if layout.checkpointing else 0) if trains else 2
        attention = (6 + (2 if layout.checkpointing else 0)) if trains else 2
        flops = tokens * (factor * model.active + attention * model.attending * model.queries * work.length)
        flops /= layout.tensor * layout.pipeline * layout.context
        seconds = flops / (c["peak_tflops"] * c.by_width("update_share", model.narrow))
        seconds *= 1 + (layout.pipeline - 1) / (passes * layout.virtual)  # stages that wait at both ends
        costs.busy["matrix units"] += times * flops / c["peak_tflops"]
        if layout.by_ranks:
            seconds += self._megatron_traffic(layout, costs, tokens, trains, times)
        else:
            seconds = max(seconds, self._gathering(layout, costs, passes, trains, times))
        own = (model.adapters or model.weights) * STEP_BYTES / layout.training
        return seconds + (own / c["hbm_tb_s"] if trains else 0.0)

    def _megatron_traffic(self, layout: Layout, costs: StepCosts, tokens: float, trains: bool, times: int) -> float:
        model, seconds = self.model, 0.0
        forwards = (3 if layout.checkpointing else 2) if trains else 1  # a backward pass sends as much as a forward one
        stage, own = model.layers / layout.pipeline, tokens / layout.context
        if (tensor := layout.tensor) > 1:
            # With sequence parallelism a layer gathers twice and scatters sums twice; going back it gathers its inputs
            # again.
            exchanges = 4 * forwards + (2 if trains else 0)
            sent = exchanges * stage * own * model.width * BF16 * (tensor - 1) / tensor
            seconds += self._send("tensor parallel", costs, sent, self._share_machine(layout, tensor), times)
        if (context := layout.context) > 1:
            sent = forwards * stage * own / tensor * (2 * model.queries + model.keys) * BF16 * (context - 1) / context
            inside = self._share_machine(layout, tensor * context)
            seconds += self._send("context parallel", costs, sent, inside, times)
        if layout.expert > 1:
            routed = own / tensor * model.picked
            sent = forwards * stage * 2 * routed * model.width * BF16 * (layout.expert - 1) / layout.expert
            inside = self._share_machine(layout, layout.expert)
            seconds += self._send("expert parallel", costs, sent, inside, times)
        if layout.pipeline > 1:
            sent = (2 if trains else 1) * own / tensor * model.width * BF16 * layout.virtual
            # Stages are numbered last: its neighbours are on other machines as soon as there are several.
            inside = self._share_machine(layout, layout.training)
            seconds += self._send("pipeline", costs, sent, inside, times)
        stage_ranks = layout.training // layout.pipeline
        trained, experts = model.adapters or model.weights, 0 if model.adapters else model.experts
        held = (trained - experts) / tensor * _to_others(layout.copies * layout.context)
        held += experts / layout.expert * _to_others(stage_ranks // layout.expert)
        if trains and held:
            # Ranks with the same weights send their float32 sums to the owner of a weight, which sends the weight back.
            inside = self._share_machine(layout, stage_ranks)
            seconds += self._send("gradients", costs, held / layout.pipeline * (FP32 + BF16), inside, times)
        return seconds

    def _gathering(self, layout: Layout, costs: StepCosts, passes: int, trains: bool, times: int) -> float:
        """FSDP: weights are gathered for a pass and again for going back, sums of gradients scattered after it."""
        if layout.training == 1:
            return 0.0
        others, inside = _to_others(layout.training), self._share_machine(layout, layout.training)
        weights, trained = BF16 * self.model.weights, FP32 * (self.model.adapters or self.model.weights)
        gathered = passes * (2 if trains else 1) * weights * others
        seconds = self._send("FSDP weights", costs, gathered, inside, times)
        if trains:
            seconds += self._send("gradients", costs, passes * trained * others, inside, times)
        return seconds

    # -- between the passes -------------------------------------------------------------------------------------------
    def _sync(self, layout: Layout, costs: StepCosts) -> float:
        """Every rollout worker gets whole weights: gathered on all that train, and broadcast to others by rank 0."""
        if layout.training == 1 and not layout.generating:
            return 0.0  # the engine reads the trainer's own
        model, c = self.model, self.constants
        # Adapters alone go to engines that compute them beside a base of their own (docs/weight_sync.md).
        split = layout.engine == "native" and layout.rollout_tensor > 1
        merged = self.work.merged or split or layout.engine == "sglang"
        size = BF16 * (model.adapters if model.adapters and not merged else model.weights)
        seconds = 0.0
        if layout.training > 1:
            inside = self._share_machine(layout, layout.training)
            seconds = self._send("weight sync: gathering", costs, size, inside)
        if layout.generating:
            rate = c["gloo_gb_s"] if self.work.gloo else c["bucket_gb_s"]
            inside = layout.training + layout.generating <= self.machine
            sending = self._send("weight sync: broadcast", costs, size, inside)
            seconds = max(seconds, sending, size / rate)  # a bucket is sent while the next one is gathered
        return seconds

    def _driver(self, layout: Layout, costs: StepCosts) -> float:
        work, c = self.work, self.constants
        size = work.rows * (c["driver_bytes"] + (work.response * c["text_bytes"] if work.texts else 0))
        core, link = work.rows * c["driver_us"], size / c["driver_gb_s"]
        costs.busy["the driver's core"] += core
        if layout.training + layout.generating <= self.machine:
            return core  # no other machine sends to it
        costs.busy["the driver's network"] += link
        costs.sent["data plane: driver", "driver"] += size
        # A row goes from the worker that wrote it to a copy of the model, whose ranks fetch it once.
        self._send("data plane: rows", costs, work.rows / layout.copies * work.length * ROW_BYTES, inside=False)
        return core + link

    def _share_machine(self, layout: Layout, ranks: int) -> bool:
        """Whether groups of so many neighbouring ranks that train lie within machines."""
        each = layout.each or most_each(layout.training, self.machine)
        return each == layout.training or each % ranks == 0

    def _send(self, what: str, costs: StepCosts, size: float, inside: bool, times: float = 1) -> float:
        """Seconds in which a GPU sends `size` bytes `inside` its machine or to another; counted `times`."""
        link = "NVLink" if inside else "network"
        rate = self.constants["nvlink_gb_s" if inside else "network_gb_s"]
        costs.sent[what, link] += size * times
        costs.busy[link] += size * times / rate
        return size / (rate * self.constants["link_share"])


def most_each(gpus: int, machine: int) -> int:
    """Most GPUs of each machine, if all machines have equally many of them."""
    return max(each for each in range(1, min(gpus, machine) + 1) if gpus % each == 0)


def _to_others(ranks: int) -> float:
    """Share of its data that a rank sends in a collective of `ranks`, which own a part each."""
    return (ranks - 1) / ranks
