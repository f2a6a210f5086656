"""What the trainer computed of each token when it first trained on it, kept for the samples: its log-prob and entropy.

A by-product of the update: no pass is made for it. Rows are known by the tensor ROW, which the trainer adds to a batch
whose samples will be written; without it nothing is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.controller.dispatch import Calls

ROW = "sample_row"
# (rows, their log-probs, their entropies), in the order in which they were trained on.
Kept = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class TokenStats:
    """Gathers on one rank; tensors stay on their device until they are taken."""

    def __init__(self) -> None:
        self._kept: Kept = []

    def add(self, batch: Any, outputs: dict[str, torch.Tensor]) -> None:
        if ROW in batch:
            self._kept.append((batch[ROW], outputs["log_probs"].detach(), outputs["entropy"].detach()))

    def take(self) -> Kept:
        """What was gathered, on the host; the next batch begins anew."""
        kept, self._kept = self._kept, []
        return [(rows.cpu(), log_probs.float().cpu(), entropy.float().cpu()) for rows, log_probs, entropy in kept]


def join_token_stats(results: list[Kept], calls: Calls) -> dict[str, torch.Tensor]:
    """`new_log_probs` and `entropy` of a batch's rows, each as of the first time that it was trained on."""
    # Several passes train a row several times; only the first saw the weights that the samples are shown beside.
    kept = [part for result in results for part in reversed(result)]
    if not kept:
        return {}
    count = 1 + max(int(rows.max()) for rows, _, _ in kept if len(rows))
    found = {name: torch.zeros(count, kept[0][1].shape[1]) for name in ("new_log_probs", "entropy")}
    for rows, log_probs, entropy in kept:  # what came earlier overwrites what came later
        found["new_log_probs"][rows], found["entropy"][rows] = log_probs, entropy
    return found
