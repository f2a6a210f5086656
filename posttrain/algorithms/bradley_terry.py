"""The loss of a reward model on pairs of a better and a worse answer.

    loss = -log sigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected)^2

Bradley and Terry (1952) model the probability that one of two answers is preferred; Ouyang et al. (2022,
arXiv:2203.02155) train reward models this way. The margin is from Touvron et al. (2023, arXiv:2307.09288). The second
term, from Eisenstein et al. (2023, arXiv:2312.09244), keeps scores near zero without changing which answer leads.

Shapes: P pairs.
"""

from __future__ import annotations

from posttrain.lazy import functional as F
from posttrain.lazy import torch


def bradley_terry_loss(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor, *, center_coef: float = 0.0
) -> torch.Tensor:
    """Return (P,) losses of the pairs."""
    # logsigmoid is stable for large score differences, log(sigmoid()) is not.
    loss_P = -F.logsigmoid(chosen_P - rejected_P - margin_P)
    return loss_P + center_coef * (chosen_P + rejected_P) ** 2 if center_coef else loss_P
