"""The torch train engine. On one process the module is whole; it is the same code that FSDP2 shards over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from posttrain import pulse
from posttrain.config.optim import OptimConfig
from posttrain.engine.base import LossFn, TrainEngine
from posttrain.engine.optim import Optimizer
from posttrain.engine.packing import Rows, Unit, packed_units, padded_rows, plan_micro_batches, plan_units
from posttrain.kernels.packed_attention import packed_rows
from posttrain.kernels.train import can_train
from posttrain.models.forward import hidden_states, log_probs_of, own_logits, token_log_probs
from posttrain.models.lora import has_adapters, merged_state
from posttrain.models.recompute import recompute_layers
from posttrain.models.value import ValueModel
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


class FSDPEngine(TrainEngine):
    """A module, its optimizer (unless frozen), and packed passes over batches."""

    def __init__(self, module: torch.nn.Module, settings: EngineSettings) -> None:
        self.module, self.settings = module, settings
        self.way = way_of(module)
        self.packed = settings.pack and self.way.packed
        self.width = module.config.get_text_config().hidden_size  # pyright: ignore
        trained = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
        self.optimizer = Optimizer(trained, settings.optim) if settings.optim is not None else None
        if self.optimizer is None:
            module.requires_grad_(False)
        if settings.gradient_checkpointing and self.optimizer is not None:
            recompute_layers(module)
        self.offload()

    # -- passes ---------------------------------------------------------------------------------------------------
    def log_probs(self, data: DataProto, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        return self._no_grad_pass(data, temperature)

    def values(self, data: DataProto) -> torch.Tensor:
        return self._no_grad_pass(data, 1.0)["values"]

    @torch.no_grad()
    def _no_grad_pass(self, data: DataProto, temperature: float) -> dict[str, torch.Tensor]:
        self.module.eval()
        out: dict[str, torch.Tensor] = {}
        for units in self._counted(self._plan(data), len(data)):
            index = [row for unit in units for row in unit.rows]
            rows = self._rows(data[index], units)
            with packed_rows(rows.layout):
                for name, part in self._forward(rows, temperature).items():
                    whole = out.setdefault(name, part.new_zeros((len(data), part.shape[1]), device="cpu"))
                    whole[index] = part.cpu()
        return out

    def _plan(self, data: DataProto) -> list[list[Unit]]:
        """The units of rows of each forward pass."""
        settings = self.settings
        share = self.packed and settings.share_prompts
        all_pairs = not can_train(next(self.module.parameters()))
        units = plan_units(data, share=share, width=self.width, all_pairs=all_pairs, max_rows=settings.max_rows)
        return plan_micro_batches(units, token_budget=settings.token_budget, max_rows=self._max_rows())

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
        if not self.packed:
            return padded_rows(micro, self.settings.device)
        return packed_units(micro, units, self.settings.device)

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        if not self.way.split_head and not isinstance(self.module, ValueModel):
            logits = own_logits(self.module, rows.input_ids, rows.attention_mask)
            log_probs_U, entropy_U = log_probs_of(rows.states(logits, rows.predict_U), rows.label_U, temperature)
            return {"log_probs": rows.scatter(log_probs_U), "entropy": rows.scatter(entropy_U)}
        positions = rows.position_ids if self.packed else None  # those of padded rows are every model's own
        hidden = hidden_states(self.module, rows.input_ids, positions, rows.attention_mask)
        hidden_UE = rows.states(hidden, rows.predict_U)
        if isinstance(self.module, ValueModel):
            return {"values": rows.scatter(self.module.token_values(hidden_UE))}
        log_probs_U, entropy_U = token_log_probs(self.module, hidden_UE, rows.label_U, temperature)
        return {"log_probs": rows.scatter(log_probs_U), "entropy": rows.scatter(entropy_U)}

    def update(self, data: DataProto, loss: LossFn, *, temperature: float = 1.0) -> dict[str, float]:
        assert self.optimizer is not None, "a frozen engine cannot be updated"
        finite = self._backward(data, loss, temperature)
        if not finite:
            for master in self.optimizer.masters:
                if master.grad is not None:
                    master.grad.fill_(float("nan"))  # the optimizer sees it, skips and reports
        return self.optimizer.step(grad_clip=self.settings.grad_clip, total_steps=self.settings.total_steps)

    def backward_only(self, data: DataProto, loss: LossFn) -> None:
        """Everything that `update` does before the step; the gradients are thrown away."""
        assert self.optimizer is not None, "a frozen engine has no backward pass"
        self._backward(data, loss, 1.0)
        self.optimizer.adam.zero_grad(set_to_none=True)

    def _backward(self, data: DataProto, loss: LossFn, temperature: float) -> bool:
        """Gradients of the whole mini-batch, one micro-batch at a time; gives whether every share was finite."""
        assert self.optimizer is not None
        self.module.eval()  # training mode would switch dropout on, and RL compares passes over the same tokens
        finite = True
        for units in self._counted(self._plan(data), len(data)):
            micro = data[[row for unit in units for row in unit.rows]].to(self.settings.device)
            rows = self._rows(micro, units)
            with packed_rows(rows.layout):
                share = loss(micro, self._forward(rows, temperature))
                finite = finite and bool(torch.isfinite(share))
                share.backward()
            self.optimizer.gather_gradients()
        return finite

    # -- weights --------------------------------------------------------------------------------------------------
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = merged_state(self.module) if has_adapters(self.module) else self.module.state_dict()
        yield from state.items()

    def save(self) -> dict[str, torch.Tensor]:
        trained = {f"model.{name}": weight.detach() for name, weight in self._kept_weights()}
        return {**trained, **(self.optimizer.state() if self.optimizer else {})}

    def _kept_weights(self) -> list[tuple[str, torch.Tensor]]:
        """With adapters only they are saved: the base does not change."""
        adapters_only = has_adapters(self.module)
        return [(name, w) for name, w in self.module.named_parameters() if w.requires_grad or not adapters_only]

    @torch.no_grad()
    def load(self, state: dict[str, torch.Tensor]) -> None:
        for name, weight in self._kept_weights():
            weight.copy_(state[f"model.{name}"])
        if self.optimizer:
            self.optimizer.load(state)

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
        """Inside, the weights (and the optimizer state) are where they are computed with."""
        self.onload(optimizer=optimizer)
        try:
            yield
        finally:
            self.offload()
