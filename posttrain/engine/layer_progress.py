"""Progress inside a pass: on a CPU a pass over many rows takes minutes, so every computed layer counts.

Hooks on the outputs of layers, and on their gradients, count; they change no numbers. On a GPU work is queued long
before it is done, so that only whole passes count there.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.pulse import Work

BACKWARD = 2  # work of a layer's backward pass, in forward passes


class LayerProgress:
    """Counts the layers of a module's passes into the work that is shown."""

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
