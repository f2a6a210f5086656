"""The torch train engine. Alone, a process holds the whole model; several cut it over themselves by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from posttrain.engine.optim import Optimizer
from posttrain.engine.packing import Rows, Unit, dummy_rows, packed_units, padded_rows, plan_passes
from posttrain.engine.ranks import Ranks
from posttrain.engine.sharding import drop_whole_weights, last_backward, shard
from posttrain.kernels.packed_attention import packed_rows
from posttrain.models.forward import TokenPass
from posttrain.models.lora import base_only, has_adapters, merged_state, save_model
from posttrain.models.recompute import recompute_layers
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

    def __init__(self, module: torch.nn.Module, settings: EngineSettings) -> None:
        self.module, self.settings = module, settings
        self.way = way_of(module)
        self.packed = settings.pack and self.way.packed
        self._facts = facts_of(
            module,
            packed=self.packed,
            share_prompts=settings.share_prompts,
            token_budget=settings.token_budget,
            max_rows=self._max_rows(),
        )
        self.forward_pass = self._forward_pass(module)
        if settings.optim is None:
            module.requires_grad_(False)
        if settings.ranks is not None:
            shard(self.forward_pass, module, settings.ranks)
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
        return self._no_grad_pass(data, 1.0, passes)["values"]

    @torch.no_grad()
    def _no_grad_pass(self, data: DataProto, temperature: float, passes: Passes | None) -> dict[str, torch.Tensor]:
        self.module.eval()
        out: dict[str, torch.Tensor] = {}
        for units in self._counted(self._plan(data) if passes is None else passes, len(data)):
            index = [row for unit in units for row in unit.rows]
            rows = self._rows(data[index], units)
            with packed_rows(rows.layout):
                found = self._forward(rows, temperature)
            for name, part in found.items() if units else ():
                whole = out.setdefault(name, part.new_zeros((len(data), part.shape[1]), device="cpu"))
                whole[index] = part.cpu()
        if self.settings.ranks is not None:
            drop_whole_weights(self.forward_pass)
        return out

    def _plan(self, data: DataProto) -> Passes:
        """The passes over a batch that this process computes alone."""
        return plan_passes(data, self._facts)

    def _max_rows(self) -> int | None:
        """Rows of a pass; one, where the model gives other numbers beside padding."""
        return self.settings.max_rows if self.packed or self.way.padded else 1

    def _counted(self, plan: list[list[Unit]], rows: int) -> Iterator[list[Unit]]:
        """The plan's passes, each told to whoever shows progress when it is done."""
        with pulse.work("rows", rows) as work:
            for units in plan:
                yield units
                work.advance(sum(len(unit.rows) for unit in units), sum(unit.tokens for unit in units))

    def _rows(self, micro: DataProto, units: list[Unit]) -> Rows:
        if not units:
            return dummy_rows(self.settings.device, packed=self.packed)
        if not self.packed:
            return padded_rows(micro, self.settings.device)
        return packed_units(micro, units, self.settings.device)

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
        self.optimizer.adam.zero_grad(set_to_none=True)

    def _backward(self, data: DataProto, loss: LossFn, temperature: float, passes: Passes | None = None) -> bool:
        """Gradients of the whole mini-batch, one micro-batch at a time; gives whether every share was finite."""
        assert self.optimizer is not None
        self.module.eval()  # training mode would switch dropout on, and RL compares passes over the same tokens
        finite = True
        passes = self._plan(data) if passes is None else passes
        for number, units in enumerate(self._counted(passes, len(data))):
            if self.settings.ranks is not None:
                last_backward(self.forward_pass, number == len(passes) - 1)
            micro = data[[row for unit in units for row in unit.rows]].to(self.settings.device)
            rows = self._rows(micro, units)
            with packed_rows(rows.layout):
                outputs = self._forward(rows, temperature)
                share = loss(micro, outputs) if units else 0.0 * sum(part.sum() for part in outputs.values())
                assert isinstance(share, torch.Tensor)
                finite = finite and bool(torch.isfinite(share))
                share.backward()
            self.optimizer.gather_gradients()
        return finite

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
            self.module.to("cpu")
        if self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move("cpu")

    def onload(self, *, optimizer: bool = False) -> None:
        if self.settings.param_offload:
            self.module.to(self.settings.device)
        if optimizer and self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move(self.settings.device)

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        self.onload(optimizer=optimizer)
        try:
            yield
        finally:
            self.offload()
