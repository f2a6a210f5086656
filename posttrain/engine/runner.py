"""The passes of a call: rows packed, computed forward and backward, one optimizer step, and progress while it lasts.

Every engine has a `PassRunner` and gives it a `Stage`: the part of the model that this rank holds, and what must be
open while it computes. A model in one piece is a pipeline of one stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain import pulse
from posttrain.engine.base import EngineSettings, LossFn, Passes, TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.engine.heads import Head
from posttrain.engine.micro_batches import Unit, plan_passes
from posttrain.engine.optim import EngineState, Optimizer
from posttrain.engine.packing import Rows, dummy_rows, packed_units, padded_rows
from posttrain.engine.pipeline import Pipeline, Step
from posttrain.engine.ranks import world_size
from posttrain.protocol import DataProto
from posttrain.pulse import Work

BACKWARD = 2  # work of a layer's backward pass, in forward passes


class LayerProgress:
    """Progress inside a pass: on a CPU a pass over many rows takes minutes, so every computed layer counts.

    Hooks on the outputs of layers and on their gradients count; they change no numbers. On a GPU work is queued long
    before it is done, so only whole passes count there.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        stacks = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList)]
        layers = max(stacks, key=lambda stack: sum(weight.numel() for weight in stack.parameters()), default=[])
        self._layers = len(layers)
        self._work: Work | None = None
        self._rows, self._steps, self._done = 0, 1, 0
        for layer in layers:
            layer.register_forward_hook(self._forward)

    def begin(self, work: Work, rows: int) -> None:
        """A pass over so many rows begins, with gradients if they are on."""
        each = 1 + BACKWARD if torch.is_grad_enabled() else 1
        self._work, self._rows, self._steps, self._done = work, rows, max(1, self._layers * each), 0

    def end(self) -> None:
        """Whatever the layers compute from here on is not counted."""
        self._work = None

    def _forward(self, layer: torch.nn.Module, given: Any, output: Any) -> None:
        if self._work is None:
            return
        self._count(1)
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> None:
        self._count(BACKWARD)

    def _count(self, steps: int) -> None:
        if self._work is not None:
            self._done = min(self._done + steps, self._steps)  # layers that are computed again count once
            self._work.inside(self._rows * self._done / self._steps)


class Stage(ABC):
    """The part of a model that this rank holds."""

    module: torch.nn.Module
    pipeline = Pipeline()

    @abstractmethod
    def forward(self, rows: Rows, arrived: torch.Tensor | None, temperature: float, chunk: int = 0) -> Any:
        """Outputs of the head by name; from a stage before the last, hidden states for the next one. `chunk` is that of
        the stage's layers, where it has several."""

    @abstractmethod
    def computing(self, rows: Rows) -> AbstractContextManager[None]:
        """Open while a pass over these rows goes forward or backward."""

    def around_passes(self, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Open over all passes of a call; with an optimizer they make gradients for it."""
        return nullcontext()

    def tokens(self, rows: Rows) -> int:
        """Hidden states of these rows that this rank sends to the next stage."""
        return rows.input_ids.shape[1]

    def prepare_rows(self, rows: Rows) -> Rows:
        """Rows as this stage takes them: ranks that share a model may have to predict something in every pass."""
        return rows

    def before_backward(self, *, last: bool) -> None:  # noqa: B027  (most engines have nothing to do)
        """A pass with gradient begins; `last` of its call."""


class _Call:
    """The passes of one call over a batch. Rows are packed when they are first asked for: on a GPU the host packs the
    next pass while the device still computes the one before."""

    def __init__(self, runner: PassRunner, data: DataProto, passes: Passes) -> None:
        self.runner, self.passes = runner, passes
        self.order = [row for units in passes for unit in units for row in unit.rows]
        self.data = data[self.order]  # the rows in the order in which they are computed: those of a pass lie together
        self.spans: list[slice] = []
        for units in passes:
            start = self.spans[-1].stop if self.spans else 0
            self.spans.append(slice(start, start + sum(len(unit.rows) for unit in units)))
        self._packed: dict[int, Rows] = {}

    def rows(self, number: int) -> Rows:
        if number not in self._packed:
            self._packed[number] = self.runner.pack(self.data[self.spans[number]], self.passes[number])
        return self._packed[number]

    def tokens(self, number: int) -> int:
        return self.runner.stage.tokens(self.rows(number))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, passes count into the progress that is shown."""
        with pulse.work("rows", len(self.order)) as self._work:
            try:
                yield
            finally:
                if self.runner.progress is not None:
                    self.runner.progress.end()

    def begin(self, number: int) -> Rows:
        """The rows of a pass that begins."""
        if self.runner.progress is not None:
            self.runner.progress.begin(self._work, self._size(number))
        return self.rows(number)

    def end(self, number: int) -> None:
        """A pass was computed; its packed rows are freed."""
        del self._packed[number]
        self._work.advance(self._size(number), sum(unit.tokens for unit in self.passes[number]))

    def _size(self, number: int) -> int:
        return self.spans[number].stop - self.spans[number].start


class PassRunner:
    """Computes batches pass by pass; shared by all engines."""

    def __init__(
        self, stage: Stage, head: Head, facts: EngineFacts, settings: EngineSettings, optimizer: Optimizer | None
    ) -> None:
        self.stage, self.head, self.facts, self.settings = stage, head, facts, settings
        self.optimizer = optimizer
        self.routes: list[np.ndarray] = []  # of the rows of the last `compute`, where they are recorded
        alone = world_size() == 1 and settings.device.type == "cpu"
        # Counts layers inside a pass, where one process computes on a CPU; None counts whole passes.
        self.progress = LayerProgress(stage.module) if alone else None

    def plan(self, data: DataProto) -> Passes:
        """The passes over a batch that this process computes alone."""
        return plan_passes(data, self.facts)

    def pack(self, micro: DataProto, units: list[Unit]) -> Rows:
        """The input of a pass; without units one that counts nothing."""
        device, packed = self.settings.device, self.facts.packed
        if not units:
            return dummy_rows(device, packed=packed)
        if not packed:
            return self.stage.prepare_rows(padded_rows(micro, device))
        records = self.settings.record_routes and not torch.is_grad_enabled()
        return self.stage.prepare_rows(packed_units(micro, units, device, all_places=records))

    @torch.no_grad()
    def compute(self, data: DataProto, temperature: float, passes: Passes | None) -> dict[str, torch.Tensor]:
        """Outputs of the head for all rows, on the host; without gradient."""
        stage, pipeline = self.stage, self.stage.pipeline
        stage.module.eval()
        call = _Call(self, data, self.plan(data) if passes is None else passes)
        parts: dict[str, list[torch.Tensor]] = {}
        routes: list[np.ndarray] = []

        def forward(step: Step, arrived: torch.Tensor | None) -> torch.Tensor | None:
            rows, is_last = call.begin(step.number), pipeline.gives_outputs(step.chunk)
            with stage.computing(rows):
                out = stage.forward(rows, arrived, temperature, step.chunk)
                found = self.head.per_row(rows, out) if is_last and call.passes[step.number] else {}
            for name, part in found.items():
                parts.setdefault(name, []).append(part)
            if self.settings.record_routes and call.passes[step.number]:
                routes.extend(_routes_of_rows(rows))
            if step.chunk == pipeline.chunks - 1:
                call.end(step.number)
            return None if is_last else out

        with stage.around_passes(None), call.counted():
            pipeline.run(len(call.passes), call.tokens, forward, backward=False)
        self.routes = [routes[number] for number in np.argsort(call.order)] if routes else []
        if not call.order:
            return {}
        place = torch.empty(len(data), dtype=torch.long)
        place[call.order] = torch.arange(len(call.order))
        # The device is waited for once, here: a copy to the host after every pass would leave it idle between them.
        return {name: values.cpu()[place] for name, values in self._on_all_stages(parts, data).items()}

    def _on_all_stages(self, parts: dict[str, list[torch.Tensor]], data: DataProto) -> dict[str, torch.Tensor]:
        """What the last stage found, on all of them."""
        pipeline = self.stage.pipeline
        if pipeline.is_last:
            found = {name: torch.cat(part) for name, part in parts.items()}
        else:
            wide = torch.promote_types(self.facts.dtype, torch.float32)
            empty = {"dtype": wide, "device": self.settings.device}
            found = {name: torch.empty(self.head.shape(data), **empty) for name in self.head.outputs}
        for values in found.values():
            pipeline.share_from_last(values)
        return found

    def gradients(self, data: DataProto, loss: LossFn, temperature: float = 1.0, passes: Passes | None = None) -> bool:
        """Add up the gradients of a whole mini-batch, one micro-batch at a time; gives whether every share of the loss
        was finite."""
        stage, pipeline, optimizer = self.stage, self.stage.pipeline, self.optimizer
        assert optimizer is not None, "a frozen engine has no backward pass"
        stage.module.eval()  # training mode would switch dropout on, and RL compares passes over the same tokens
        call = _Call(self, data, self.plan(data) if passes is None else passes)
        on_device = call.data[:].to(self.settings.device)  # one copy for all passes
        finite = torch.ones((), dtype=torch.bool, device=self.settings.device)  # read once, after the last pass
        under_way: dict[Step, tuple[torch.Tensor | None, torch.Tensor]] = {}  # by the step that goes back

        def forward(step: Step, arrived: torch.Tensor | None) -> torch.Tensor:
            nonlocal finite
            number = step.number
            stage.before_backward(last=number == len(call.passes) - 1)
            rows = call.begin(number)
            if arrived is not None:
                arrived.requires_grad_(True)  # its gradient goes back to the stage before
            with stage.computing(rows):
                out = stage.forward(rows, arrived, temperature, step.chunk)
                if pipeline.gives_outputs(step.chunk):
                    found = self.head.per_row(rows, out)
                    if call.passes[number]:
                        out = loss(on_device[call.spans[number]], found)
                    else:  # a gradient of zero: ranks that share the model all go backward
                        out = 0.0 * sum(part.sum() for part in found.values())
                    assert isinstance(out, torch.Tensor)
                    finite = finite & torch.isfinite(out.detach())
            under_way[step._replace(backward=True)] = arrived, out
            return out

        def backward(step: Step, gradient: torch.Tensor | None) -> torch.Tensor | None:
            arrived, out = under_way.pop(step)
            with stage.computing(call.rows(step.number)):
                torch.autograd.backward(out, gradient)
            optimizer.gather_gradients()
            if step.chunk == 0:
                call.end(step.number)
            return None if arrived is None else arrived.grad

        def compute(step: Step, arrived: torch.Tensor | None) -> torch.Tensor | None:
            return backward(step, arrived) if step.backward else forward(step, arrived)

        with stage.around_passes(optimizer), call.counted():
            pipeline.run(len(call.passes), call.tokens, compute, backward=True)
        optimizer.reduce_gradients()
        return bool(finite)

    def update(self, data: DataProto, loss: LossFn, temperature: float, passes: Passes | None) -> dict[str, float]:
        """One optimizer step; a loss or gradient that is not finite changes nothing and is reported."""
        optimizer = self.optimizer
        assert optimizer is not None, "a frozen engine cannot be updated"
        if not self.gradients(data, loss, temperature, passes):
            for master in optimizer.masters:
                if master.grad is not None:
                    # Other ranks may have finite losses. The norm over all ranks tells them: every one of them skips.
                    master.grad.fill_(float("nan"))
        return optimizer.step(grad_clip=self.settings.grad_clip, total_steps=self.settings.total_steps)

    def trial_pass(self, data: DataProto, loss: LossFn, passes: Passes | None) -> None:
        """Gradients that are thrown away."""
        self.gradients(data, loss, passes=passes)
        assert self.optimizer is not None
        self.optimizer.clear_gradients()


def _routes_of_rows(rows: Rows) -> list[np.ndarray]:
    assert rows.routes is not None and rows.token_places is not None
    shape, chosen_TLK = rows.routes.shape, rows.routes.chosen_TLK().cpu()
    assert shape is not None
    return [chosen_TLK[places].numpy().astype(shape.dtype) for places in rows.token_places]


class ComposedEngine(TrainEngine):
    """An engine that is made of a pass runner and the state that it trains; what is left to say is about weights."""

    runner: PassRunner
    state: EngineState

    def facts(self) -> EngineFacts:
        return self.runner.facts

    def compute(
        self, data: DataProto, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, torch.Tensor]:
        return self.runner.compute(data, temperature, passes)

    def update(
        self, data: DataProto, loss: LossFn, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, float]:
        return self.runner.update(data, loss, temperature, passes)

    def trial_pass(self, data: DataProto, loss: LossFn, *, passes: Passes | None = None) -> None:
        self.runner.trial_pass(data, loss, passes)

    def take_routes(self) -> list[np.ndarray]:
        taken, self.runner.routes = self.runner.routes, []
        return taken

    def save(self, folder: Path) -> None:
        self.state.save(folder)

    def begin_save(self, folder: Path) -> str | None:
        return self.state.begin_save(folder)

    def take_save_wait(self) -> float:
        return self.state.copies.take_waited()

    def load(self, folder: Path) -> None:
        self.state.load(folder)

    def offload(self) -> None:
        self.state.offload()

    def onload(self, *, optimizer: bool = False) -> None:
        self.state.onload(optimizer=optimizer)
