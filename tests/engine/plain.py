"""The textbook, slowly: rows one by one through transformers' own forward pass, formulas written out, AdamW by hand.

What the tests here and in tests/workers compare the engine with. Shapes: B rows, R response width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from posttrain.protocol import DataProto


def plain_model(folder: Path) -> Any:
    """Transformers' own model in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def rows_of(batch: DataProto) -> Iterable[tuple[torch.Tensor, int]]:
    """(token ids without padding, tokens of the response) of each row."""
    width = batch.batch["responses"].shape[1]
    for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), strict=True):
        yield ids[mask], int(mask[-width:].sum())


def plain_outputs(model: Any, batch: DataProto, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies), each (B, R), with their gradient."""
    width = batch.batch["responses"].shape[1]
    log_probs, entropies = [], []
    for ids, length in rows_of(batch):
        logp = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)[-length - 1 : -1]
        log_probs.append(pad(logp.gather(1, ids[-length:, None])[:, 0], (0, width - length)))
        entropies.append(pad(-(logp.exp() * logp).sum(-1), (0, width - length)))
    return torch.stack(log_probs), torch.stack(entropies)


def aggregated(values_BR: torch.Tensor, mask_BR: torch.Tensor, mode: str, constant: float = 12.0) -> torch.Tensor:
    """Token losses as one number, by the words of the setting."""
    rows = [values[mask.bool()] for values, mask in zip(values_BR, mask_BR, strict=True)]
    return {
        "token-mean": lambda: torch.cat(rows).mean(),
        "token-sum": lambda: torch.cat(rows).sum(),
        "seq-mean-token-sum": lambda: torch.stack([row.sum() for row in rows]).mean(),
        "seq-mean-token-mean": lambda: torch.stack([row.mean() for row in rows]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([row.sum() / constant for row in rows]).mean(),
    }[mode]()


def clipped_loss(log_prob: torch.Tensor, batch: DataProto, weights: torch.Tensor | float = 1.0) -> torch.Tensor:
    """(B, R): PPO's loss with the default clip (0.2) and dual clip (3), times importance weights."""
    advantages, ratio = batch.batch["advantages"].double(), (log_prob - batch.batch["old_log_probs"].double()).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(losses, -3 * advantages), losses) * weights


def low_var_kl(log_prob: torch.Tensor, batch: DataProto) -> torch.Tensor:
    gap = batch.batch["ref_log_prob"].double() - log_prob
    return (gap.exp() - gap - 1).clamp(max=10.0)


def plain_loss(
    outputs: tuple[torch.Tensor, torch.Tensor],
    batch: DataProto,
    *,
    mode: str = "token-mean",
    kl: float = 0.0,
    entropy: float = 0.0,
    token_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Policy loss + kl * KL - entropy * entropy of `plain_outputs`, each aggregated by `mode`.

    `token_loss` replaces the clipped loss.
    """
    mask, (log_prob, entropies) = batch.batch["response_mask"], outputs
    losses = clipped_loss(log_prob, batch) if token_loss is None else token_loss(log_prob)
    return aggregated(losses + kl * low_var_kl(log_prob, batch) - entropy * entropies, mask, mode)


def flat_gradient(loss: torch.Tensor, model: Any) -> torch.Tensor:
    """The graph stays, so that several losses can be made of the same outputs."""
    parts = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


class PlainAdamW:
    """AdamW with decoupled decay of matrices alone, the gradient's norm bounded first (arXiv 1711.05101)."""

    def __init__(self, model: Any, *, betas: tuple[float, float], eps: float, decay: float, clip: float) -> None:
        self.weights = list(model.parameters())
        self.betas, self.eps, self.decay, self.clip = betas, eps, decay, clip
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]
        self.steps = 0

    def step(self, loss: torch.Tensor, rate: float) -> float:
        """One step; gives the norm of the gradient before it is bounded."""
        grads = torch.autograd.grad(loss, self.weights)
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        self.steps += 1
        with torch.no_grad():
            for weight, grad, first, second in zip(self.weights, grads, self.first, self.second, strict=True):
                grad = grad * min(1.0, self.clip / norm)
                first.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
                second.mul_(self.betas[1]).add_(grad**2, alpha=1 - self.betas[1])
                if weight.ndim >= 2:
                    weight.mul_(1 - rate * self.decay)
                top = first / (1 - self.betas[0] ** self.steps)
                weight.sub_(rate * top / ((second / (1 - self.betas[1] ** self.steps)).sqrt() + self.eps))
        return norm


def flat_weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])
