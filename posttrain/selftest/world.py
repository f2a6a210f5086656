"""What the checks share: this rank, a tiny model, batches, training steps, and the numbers of one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineLayout, EngineSettings, TrainEngine
from posttrain.engine.micro_batches import plan_ranks
from posttrain.engine.registry import build_train_engine
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

ALLOWED = 1e-3  # relative, in float32: ranks and devices add in other orders
EPSILON = 1e-3  # of Adam: by less, rounding of the smallest gradients would decide about the sign of a whole step
STEPS = 2
ROWS = 16


class CheckFailed(Exception):
    """What a check found, as a sentence for the report."""


@dataclass
class World:
    """One rank among all, and the model of every check."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    facts: list[str] = field(default_factory=list)
    """Sentences about what was measured, for the report."""

    def __post_init__(self) -> None:
        self.model = ModelConfig(path=str(self.folder / "model"))
        self.tokenizer = load_tokenizer(self.model)
        self._host = load_causal_lm(self.model, dtype=torch.float32, device=torch.device("cpu"))

    def module(self, device: torch.device | None = None) -> torch.nn.Module:
        """A fresh copy of the model, on this rank's device unless another is given."""
        return copy.deepcopy(self._host).to(device or self.device)

    def engine(self, module: torch.nn.Module, layout: EngineLayout | None = None) -> TrainEngine:
        """That trains over all ranks; without a layout, alone in this process."""
        optim = OptimConfig(lr=1e-2, eps=EPSILON)
        settings = EngineSettings(device=self.device, optim=optim, grad_clip=1e9, token_budget=120)
        return TorchEngine(module, settings) if layout is None else build_train_engine(module, settings, layout)

    def gathered(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """The same vector of every rank, in their order."""
        own = numbers.to(self.device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        if self.size == 1:
            return [own]
        dist.all_gather(parts, own)
        return parts


def batch_of(number: int) -> DataProto:
    """Random rows of uneven lengths, whose token weights are those of the whole batch."""
    rng = np.random.default_rng(number)
    prompts = [rng.integers(0, 256, rng.integers(2, 10)).tolist() for _ in range(ROWS)]
    outputs = [Output(row, rng.integers(0, 256, rng.integers(1, 13)).tolist(), [], "stop", []) for row in range(ROWS)]
    for output in outputs:
        output.log_probs = [-5.0] * len(output.token_ids)
    batch = to_batch(prompts, outputs, pad_token_id=0)
    batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(ROWS)], dtype=object)
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.from_numpy(rng.normal(size=mask.shape)).float() * mask / float(mask.sum())
    return batch


def loss(micro: DataProto, out: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return -(micro.batch["advantages"] * out["log_probs"]).sum()


@dataclass
class Trained:
    norms: list[float]
    weights: dict[str, torch.Tensor]


def train(engine: TrainEngine, world: World | None = None, *, first: int = 0, steps: int = STEPS) -> Trained:
    """Gradient norms of the steps and the weights after them. Without a world this process computes all rows."""
    norms = []
    for number in range(first, steps):
        batch, passes = batch_of(number), None
        if world is not None and world.size > 1:
            facts, stage = engine.facts(), world.size // engine.facts().pipeline
            parts = plan_ranks(batch, facts, stage // facts.sequence_parallel)
            mine = parts[world.rank % stage // facts.sequence_parallel]
            batch, passes = batch[mine.rows], mine.passes
        norms.append(engine.update(batch, loss, passes=passes)["grad_norm"])
    return Trained(norms, {name: weight.detach().cpu().clone() for name, weight in engine.export_weights()})


def compare_with_one_device(world: World, found: Trained, expected: Trained) -> None:
    """Raises with the first difference beyond rounding, and what it looks like."""
    ratios = [mine / theirs for mine, theirs in zip(found.norms, expected.norms, strict=True)]
    if max(abs(ratio - 1) for ratio in ratios) > ALLOWED:
        like = ", ".join(f"{ratio:.4g}" for ratio in ratios)
        scaled = max(ratios) - min(ratios) < 10 * ALLOWED * max(ratios)
        cause = "the gradient has a wrong scale" if scaled else "gradients are not summed as they should be"
        raise CheckFailed(f"gradient norms over {world.size} ranks are {like} times those of one device: {cause}")
    for name, weight in expected.weights.items():
        apart = relative(found.weights[name], weight)
        if apart > ALLOWED:
            raise CheckFailed(
                f"after {STEPS} steps the weight {name} is {apart:.1e} (relative) from that of one device"
            )
    furthest = max(abs(ratio - 1) for ratio in ratios)
    world.facts.append(f"gradient norms within {furthest:.1e} of one device")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.abs().max()) or 1.0
    return float((found.to(expected) - expected).abs().max()) / scale


def one_device(world: World, module: torch.nn.Module | Any = None) -> Trained:
    """The same steps in this process alone."""
    return train(world.engine(world.module() if module is None else module))
