"""AdamW over float32 masters, gradient clipping, learning-rate schedules; what of it all checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from posttrain.checkpoint.dcp import read_checked
from posttrain.checkpoint.parts import HostCopies, RolePart
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.kernels.gradient_sums import added_sum, close_sums, open_sums

STEPS = "optim.steps_done"


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (counted from 0) of `total_steps`."""
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    low = config.min_lr_ratio
    if config.lr_scheduler_type == "linear":
        return config.lr * (low + (1 - low) * (1 - progress))
    if config.lr_scheduler_type == "cosine":
        return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
    return config.lr


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of one that is sharded over ranks, all of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _master(weight: torch.nn.Parameter, held: bool) -> torch.nn.Parameter:
    """What a weight's gradients are added up in. Of a weight that another rank steps it is one number in the weight's
    shape: a gradient needs a tensor of its shape to belong to, but no copy of the weight."""
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    if held:
        return torch.nn.Parameter(weight.detach().float())
    return torch.nn.Parameter(torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape))


class Optimizer:
    """AdamW whose masters are float32 copies of low-precision weights, or the weights themselves.

    Gradients are added up in the masters' precision after every micro-batch: a sum in bfloat16 would be rounded
    differently for every split into micro-batches. Where `open_sums` was called, the matrix products that make the
    gradients add them up themselves.

    `held` says which weights this rank steps, where ranks with the same weights share the moments; None steps all.
    """

    def __init__(
        self,
        named_weights: list[tuple[str, torch.nn.Parameter]],
        config: OptimConfig,
        held: Sequence[bool] | None = None,
    ) -> None:
        self.config = config
        self.names = [name for name, _ in named_weights]
        self.weights = [weight for _, weight in named_weights]
        self.held = [True] * len(self.weights) if held is None else list(held)
        self.masters = [_master(weight, own) for weight, own in zip(self.weights, self.held, strict=True)]
        stepped = [master for master, own in zip(self.masters, self.held, strict=True) if own]
        # Norms and biases are not decayed, as is usual for transformers.
        decayed = [master for master in stepped if master.ndim >= 2]
        plain = [master for master in stepped if master.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        betas = (config.betas[0], config.betas[1])
        groups = [group for group in groups if group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
        self.steps_done = 0
        self.before_change: Callable[[], object] = lambda: None
        """Called before weights and moments change: whoever copies them has to be done."""

    def open_sums(self) -> None:
        """Let matrix products add up their gradients in the masters' precision: of matrices with separate masters, and
        of adapters, which are their own masters. It saves a pass over all gradients after every micro-batch."""
        named = [x for x in zip(self.names, self.weights, self.masters, strict=True) if x[1].ndim == 2]
        taken = [weight for _, weight, master in named if master is not weight]
        for kind in (".lora_A.", ".lora_B."):  # A of parts that read the same input follow each other: one product
            taken += [weight for name, weight, master in named if master is weight and kind in name]
        open_sums(taken)

    def clear_gradients(self) -> None:
        close_sums(self.weights)
        self.adam.zero_grad(set_to_none=True)

    def gather_gradients(self) -> None:
        """Add the gradients of a micro-batch to the masters' and clear them."""
        sums, grads = [], []
        for weight, master in zip(self.weights, self.masters, strict=True):
            total = added_sum(weight)
            # A sum that products made is the master's gradient itself; a gradient from elsewhere is added to it.
            if total is not None and master.grad is not total:
                master.grad = total if master.grad is None else total.add_(master.grad)
            if master is weight or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.to(master.dtype)
            else:
                sums.append(master.grad)
                grads.append(weight.grad)
            weight.grad = None
        if sums:
            # One kernel for many tensors: hundreds of small additions would cost more in launches than in arithmetic.
            torch._foreach_add_(sums, grads)  # pyright: ignore

    def reduce_gradients(self) -> None:
        """After the last pass: let ranks with copies of a weight add their gradients up. FSDP2 does that in the
        backward pass."""

    def step(self, *, grad_clip: float, total_steps: int) -> dict[str, float]:
        """Clip, step and clear; a gradient that is not finite changes nothing and is reported."""
        norm = self.clip_gradients(grad_clip if grad_clip > 0 else math.inf)
        rate = learning_rate(self.config, self.steps_done, total_steps)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.before_change()  # after the line above, which waits for the device anyway
            for group in self.adam.param_groups:
                group["lr"] = rate
            self._follow_masters()
            self.adam.step()
            self._write_back()
        self.steps_done += 1  # a skipped step counts, too: the learning rate follows the run's plan
        self.clear_gradients()
        return {"grad_norm": float(norm), "lr": rate, "skipped": float(not finite)}

    def clip_gradients(self, largest: float) -> torch.Tensor:
        """The norm of all gradients, which are scaled down to `largest` where it is above."""
        return whole(torch.nn.utils.clip_grad_norm_(self.masters, largest))

    def _follow_masters(self) -> None:
        # Move moments to the device of the masters: they may have been made or loaded while these were offloaded.
        first = next(iter(self.adam.state), None)
        if first is not None and any(value.device != first.device for value in self.adam.state[first].values()):
            for master, state in self.adam.state.items():
                for key, value in state.items():
                    state[key] = value.to(master.device)

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = [(w.data, m.data) for _, w, m in self._stepped() if m is not w]
        if pairs:
            torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])  # pyright: ignore

    def _stepped(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
        """Name, weight and master of what this rank steps."""
        for name, weight, master, own in zip(self.names, self.weights, self.masters, self.held, strict=True):
            if own:
                yield name, weight, master

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, which stand for the weights, moments and step counts by the weights' names."""
        found: dict[str, torch.Tensor] = {STEPS: torch.tensor(self.steps_done)}
        for name, _, master in self._stepped():
            found[f"model.{name}"] = master.detach()
            for key, value in self._moments(master).items():
                found[f"optim.{key}.{name}"] = value
        return found

    def _moments(self, master: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        # AdamW's state of one master, made as zeros before the first step so that there is always one to load into.
        state = self.adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    def loaded(self, state: dict[str, torch.Tensor]) -> None:
        """The tensors that `state` gave have been filled."""
        self.steps_done = int(state[STEPS])
        self._write_back()

    def move(self, device: torch.device | str) -> None:
        """Moments (and separate masters) to `device`; weights are the engine's to move."""
        for _, weight, master in self._stepped():
            if master is not weight:
                master.data = master.data.to(device)
            for key, value in self.adam.state.get(master, {}).items():
                self.adam.state[master][key] = value.to(device)


class EngineState:
    """Saves, loads and offloads for an engine.

    `weights` gives the weights to save by their names in a checkpoint, `movable` is the module that is moved to host
    memory and back. With `parts` a checkpoint also holds weights of other ranks under names of their own.
    """

    def __init__(
        self,
        settings: EngineSettings,
        optimizer: Optimizer | None,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        movable: torch.nn.Module,
        *,
        together: bool,
        parts: bool = False,
    ) -> None:
        self.settings, self.optimizer, self.weights, self.movable = settings, optimizer, weights, movable
        self.together, self.parts = together, parts
        self.copies = HostCopies()
        if optimizer is not None:
            optimizer.before_change = self.copies.wait

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that an exact continuation needs: live tensors by flat names, the same for any number of ranks.

        Trained weights are there in the optimizer's precision.
        """
        # The optimizer's masters replace low-precision weights under the same names: they are what training goes on
        # from, and the weights are rounded from them.
        weights = {f"model.{name}": weight.detach() for name, weight in self.weights()}
        return {**weights, **(self.optimizer.state() if self.optimizer else {})}

    def save(self, folder: Path) -> None:
        RolePart(folder, self.tensors(), together=self.together).save()

    def begin_save(self, folder: Path) -> str | None:
        return RolePart(folder, self.tensors(), together=self.together, copies=self.copies).begin()

    def load(self, folder: Path) -> None:
        self.copies.wait()
        tensors = self.tensors()
        read_checked(folder, tensors, partial=self.parts)
        if self.optimizer:
            self.optimizer.loaded(tensors)

    def offload(self) -> None:
        moves_optimizer = self.settings.optimizer_offload and self.optimizer is not None
        if self.settings.param_offload or moves_optimizer:
            self.copies.wait()  # it holds the tensors: their memory would not be free
        if self.settings.param_offload:
            self.movable.to("cpu")
        if self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move("cpu")

    # Moments are only needed in the update, so that they come back by request: a pass without gradient has their room.
    # What is copied for a save meanwhile is the tensors in host memory, which moving leaves as they are.
    def onload(self, *, optimizer: bool = False) -> None:
        if self.settings.param_offload:
            self.movable.to(self.settings.device)
        if optimizer and self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move(self.settings.device)
