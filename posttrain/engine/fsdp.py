"""The torch train engine. Alone, a process holds the whole model; several cut it over themselves by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain import pulse
from posttrain.checkpoint.dcp import read_checked, write_tensors
from posttrain.config.optim import OptimConfig
from posttrain.engine.base import LossFn, Passes, TrainEngine
from posttrain.engine.export import export_from_ranks, whole_state
from posttrain.engine.facts import EngineFacts, facts_of
from posttrain.engine.layer_progress import LayerProgress
from posttrain.engine.optim import Optimizer
from posttrain.engine.packing import Rows, Unit, dummy_rows, packed_units, padded_rows, plan_passes, with_a_place
from posttrain.engine.ranks import Ranks, check_heads
from posttrain.engine.sharding import drop_whole_weights, last_backward, shard
from posttrain.kernels.packed_attention import packed_rows
from posttrain.kernels.sequence_parallel import shared_sequence
from posttrain.models.forward import TokenPass
from posttrain.models.fused_layer import join_weights
from posttrain.models.lora import base_only, has_adapters, merged_state, save_model
from posttrain.models.recompute import recompute_layers
from posttrain.models.unchanged import weights_unchanged
from posttrain.models.ways import way_of
from posttrain.protocol import DataProto


@dataclass
class EngineSettings:
    """How an engine cuts its work and steps its optimizer."""

    device: torch.device
    optim: OptimConfig | None = None
    total_steps: int = 1
    grad_clip: float = 1.0
    token_budget: int = 16384
    max_rows: int | None = None
    pack: bool = True
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    ranks: Ranks | None = None


class FSDPEngine(TrainEngine):
    """A module, its optimizer (unless frozen), and packed passes over batches."""

    pairs = False
    """Whether rows come in pairs."""

    progress: LayerProgress | None = None
    """Counts layers inside a pass, where one process computes on a CPU; None counts whole passes."""

    def __init__(self, module: torch.nn.Module, settings: EngineSettings) -> None:
        self.module, self.settings = module, settings
        self.way = way_of(module)
        self.packed = settings.pack and self.way.packed
        alone = not self.packed and not self.way.padded  # such a model gives other numbers beside padding
        self._facts = facts_of(
            module,
            packed=self.packed,
            share_prompts=settings.share_prompts,
            token_budget=settings.token_budget,
            max_rows=1 if alone else settings.max_rows,
            sequence_parallel=settings.ranks.sequence_size if settings.ranks else 1,
            pairs=self.pairs,
        )
        check_heads(module.config, self._facts.sequence_parallel, packed=self.packed)
        self.forward_pass = self._forward_pass(module)
        if settings.ranks is None and settings.device.type == "cpu":
            self.progress = LayerProgress(module)
        if settings.optim is None:
            module.requires_grad_(False)
        if settings.ranks is not None:
            shard(self.forward_pass, module, settings.ranks)
        else:
            join_weights(module)
        trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self.optimizer = Optimizer(trained, settings.optim) if settings.optim is not None else None
        if settings.gradient_checkpointing and self.optimizer is not None:
            recompute_layers(module)
        self.offload()

    def facts(self) -> EngineFacts:
        return self._facts

    def _forward_pass(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module whose `forward` is a whole pass."""
        return TokenPass(module, split_head=self.way.split_head)

    # -- passes ---------------------------------------------------------------------------------------------------
    def log_probs(
        self, data: DataProto, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, torch.Tensor]:
        return self._no_grad_pass(data, temperature, passes)

    def values(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        found = self._no_grad_pass(data, 1.0, passes)
        return found["values"] if found else torch.zeros(data.batch["responses"].shape)  # a rank without rows

    @torch.no_grad()
    def _no_grad_pass(self, data: DataProto, temperature: float, passes: Passes | None) -> dict[str, torch.Tensor]:
        self.module.eval()
        parts: dict[str, list[torch.Tensor]] = {}
        passes = self._plan(data) if passes is None else passes
        order = _order(passes)
        ordered = data[order]
        with self._unchanged():
            for units, here in self._counted(passes):
                rows = self._rows(ordered[here], units)
                with self._computing(rows):
                    found = self._forward(rows, temperature)
                for name, part in found.items() if units else ():
                    parts.setdefault(name, []).append(part)
        if self.settings.ranks is not None:
            drop_whole_weights(self.forward_pass)
        place = torch.empty(len(data), dtype=torch.long)
        place[order] = torch.arange(len(order))
        return {name: torch.cat(found).cpu()[place] for name, found in parts.items()}  # the device is waited for once

    def _plan(self, data: DataProto) -> Passes:
        """The passes over a batch that this process computes alone."""
        return plan_passes(data, self._facts)

    def _counted(self, passes: Passes) -> Iterator[tuple[list[Unit], slice]]:
        """The passes, and where their rows lie if all are in order; each is told to whoever shows progress."""
        start = 0
        with pulse.work("rows", len(_order(passes))) as work:
            for units in passes:
                end = start + sum(len(unit.rows) for unit in units)
                with self.progress.of(work, end - start) if self.progress else nullcontext():
                    yield units, slice(start, end)
                work.advance(end - start, sum(unit.tokens for unit in units))
                start = end

    def _rows(self, micro: DataProto, units: list[Unit]) -> Rows:
        if not units:
            return dummy_rows(self.settings.device, packed=self.packed)
        device = self.settings.device
        rows = packed_units(micro, units, device) if self.packed else padded_rows(micro, device)
        return rows if self.settings.ranks is None else with_a_place(rows)

    @contextmanager
    def _computing(self, rows: Rows) -> Iterator[None]:
        ranks = self.settings.ranks
        with packed_rows(rows.layout), shared_sequence(ranks.sequence if ranks else None):
            yield

    def _unchanged(self):
        """Over the passes of a call weights stay as they are, and where they are unless ranks gather them each time."""
        return weights_unchanged() if self.settings.ranks is None else nullcontext()

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        positions = rows.position_ids if self.packed else None  # those of padded rows are every model's own
        inputs = (rows.input_ids, positions, rows.attention_mask)
        found = self.forward_pass(*inputs, rows.predict_U, rows.label_U, temperature)
        return {name: rows.scatter(values_U) for name, values_U in found.items()}

    def update(
        self, data: DataProto, loss: LossFn, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, float]:
        assert self.optimizer is not None, "a frozen engine cannot be updated"
        finite = self._backward(data, loss, temperature, passes)
        if not finite:
            for master in self.optimizer.masters:
                if master.grad is not None:
                    master.grad.fill_(float("nan"))  # the optimizer sees it, skips and reports
        return self.optimizer.step(grad_clip=self.settings.grad_clip, total_steps=self.settings.total_steps)

    def trial_pass(self, data: DataProto, loss: LossFn, *, passes: Passes | None = None) -> None:
        assert self.optimizer is not None, "a frozen engine has no backward pass"
        self._backward(data, loss, 1.0, passes)
        self.optimizer.clear_gradients()

    def _backward(self, data: DataProto, loss: LossFn, temperature: float, passes: Passes | None = None) -> bool:
        """Gradients of the whole mini-batch, one micro-batch at a time; gives whether every share was finite."""
        with self._unchanged():
            return self._backward_passes(data, loss, temperature, passes)

    def _backward_passes(self, data: DataProto, loss: LossFn, temperature: float, passes: Passes | None) -> bool:
        assert self.optimizer is not None
        self.module.eval()  # training mode would switch dropout on, and RL compares passes over the same tokens
        finite = torch.ones((), dtype=torch.bool, device=self.settings.device)
        passes = self._plan(data) if passes is None else passes
        ordered = data[_order(passes)]
        there = ordered[:].to(self.settings.device)
        if self.settings.ranks is None and self.settings.device.type == "cuda":
            self.optimizer.open_sums()
        for number, (units, here) in enumerate(self._counted(passes)):
            if self.settings.ranks is not None:
                last_backward(self.forward_pass, number == len(passes) - 1)
            rows, micro = self._rows(ordered[here], units), there[here]
            with self._computing(rows):
                outputs = self._forward(rows, temperature)
                share = loss(micro, outputs) if units else 0.0 * sum(part.sum() for part in outputs.values())
                assert isinstance(share, torch.Tensor)
                finite = finite & torch.isfinite(share.detach())
                share.backward()
            self.optimizer.gather_gradients()
        return bool(finite)

    # -- weights --------------------------------------------------------------------------------------------------
    @contextmanager
    def base_only(self) -> Iterator[None]:
        with base_only(self.module):
            yield

    def live_model(self) -> torch.nn.Module | None:
        return self.module if self.settings.ranks is None else None

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.settings.ranks is not None:
            yield from whole_state(self.module, self.forward_pass)
            return
        state = merged_state(self.module) if has_adapters(self.module) else self.module.state_dict()
        yield from state.items()

    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        if self.settings.ranks is not None:
            with self.on_device():  # ranks gather weights where they met: NCCL knows none in host memory
                export_from_ranks(self.module, self.forward_pass, folder, adapter, merged=merged)
        else:
            save_model(self.module, folder, adapter, merged=merged)

    def save(self, folder: Path) -> None:
        write_tensors(folder, self.state(), together=self.settings.ranks is not None)

    def load(self, folder: Path) -> None:
        state = self.state()
        read_checked(folder, state)
        if self.optimizer:
            self.optimizer.loaded(state)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that an exact continuation needs: live tensors by flat names, the same for any number of ranks.

        Trained weights are there in the optimizer's precision.
        """
        weights = {f"model.{name}": weight.detach() for name, weight in self._kept_weights()}
        return {**weights, **(self.optimizer.state() if self.optimizer else {})}

    def _kept_weights(self) -> list[tuple[str, torch.Tensor]]:
        """With adapters only they are saved: the base does not change."""
        adapters_only = has_adapters(self.module)
        return [(name, w) for name, w in self.module.named_parameters() if w.requires_grad or not adapters_only]

    # -- memory ---------------------------------------------------------------------------------------------------
    def offload(self) -> None:
        if self.settings.param_offload:
            self._movable().to("cpu")
        if self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move("cpu")

    def onload(self, *, optimizer: bool = False) -> None:
        if self.settings.param_offload:
            self._movable().to(self.settings.device)
        if optimizer and self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move(self.settings.device)

    def _movable(self) -> torch.nn.Module:
        """What is moved: a sharded model with the pass around it, which gathers the weights outside its layers, and
        would go on with those where they were."""
        return self.module if self.settings.ranks is None else self.forward_pass

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        self.onload(optimizer=optimizer)
        try:
            yield
        finally:
            self.offload()


def _order(passes: Passes) -> list[int]:
    """All rows in the order in which they are computed."""
    return [row for units in passes for unit in units for row in unit.rows]
