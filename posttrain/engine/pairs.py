"""A train engine for scorers: rows in pairs, one score at each row's end.

A batch holds the better and the worse answer of each pair one after the other. Both are always computed in the same
pass, since the loss of a pair needs both scores; what they have in common at their beginning is computed once, where
that is cheaper. So no split of a batch into passes changes the gradient.

Behind each answer stands one more token, which is never computed: the state that would predict it is that of the
answer's end, and is scored.

Shapes: B rows, two per pair.
"""

from __future__ import annotations

import torch

from posttrain.engine.base import Passes
from posttrain.engine.fsdp import FSDPEngine
from posttrain.engine.packing import Rows
from posttrain.engine.pair_units import passes_of_pairs, plan_pairs
from posttrain.models.scorer import PaddedScorePass, ScorePass
from posttrain.protocol import DataProto


class PairEngine(FSDPEngine):
    """A scorer and its optimizer. `settings.max_rows` counts pairs here."""

    pairs = True

    def _forward_pass(self, module: torch.nn.Module) -> torch.nn.Module:
        return ScorePass(module) if self.packed else PaddedScorePass(module)

    def scores(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        """(B,) scores of all rows; no gradient."""
        found = self._no_grad_pass(data, 1.0, passes)
        return found["scores"][:, 0] if found else torch.zeros(0)  # a rank without rows

    def _plan(self, data: DataProto) -> Passes:
        return passes_of_pairs(plan_pairs(data, self._facts), self._facts)

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        if self.packed:
            count, width = rows.shape
            tokens_B = torch.bincount(rows.slot_N // width, minlength=count)  # of the answers, in the order of rows
            ends_B = rows.of_tokens(rows.predict_U)[tokens_B.cumsum(0) - 1]
            return {"scores": self.forward_pass(rows.input_ids, rows.position_ids, ends_B)[:, None]}
        assert rows.attention_mask is not None
        real = zip(rows.input_ids, rows.attention_mask.bool(), strict=True)
        return {"scores": self.forward_pass([ids[mask][:-1].tolist() for ids, mask in real])[:, None]}
