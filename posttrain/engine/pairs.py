"""A train engine for scorers: rows in pairs, one score at each row's end.

A batch holds the better and the worse answer of each pair one after the other. Both are always computed in the same
pass, since the loss of a pair needs both scores; what they have in common at their beginning is computed once, where
that is cheaper. So no split of a batch into passes changes the gradient.

Behind each answer stands one more token, which is never computed: the state that would predict it is that of the
answer's end, and is scored.

Shapes: B rows, two per pair.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from posttrain.engine.base import Passes
from posttrain.engine.fsdp import FSDPEngine
from posttrain.engine.packing import Rows, Unit, plan_micro_batches, plan_units
from posttrain.models.scorer import PaddedScorePass, ScorePass
from posttrain.protocol import DataProto


class PairEngine(FSDPEngine):
    """A scorer and its optimizer. `settings.max_rows` counts pairs here."""

    def _forward_pass(self, module: torch.nn.Module) -> torch.nn.Module:
        return ScorePass(module) if self.packed else PaddedScorePass(module)

    def scores(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        """(B,) scores of all rows; no gradient."""
        return self._no_grad_pass(data, 1.0, passes)["scores"][:, 0]

    def _plan(self, data: DataProto) -> Passes:
        """Pairs of each pass, as units that share their beginning or do not."""
        pairs = [self._pair(data, row) for row in range(0, len(data), 2)]
        whole = [Unit([number], [0], sum(unit.tokens for unit in pair)) for number, pair in enumerate(pairs)]
        passes = plan_micro_batches(whole, token_budget=self.settings.token_budget, max_rows=self._facts.max_rows)
        return [[unit for chosen in units for unit in pairs[chosen.rows[0]]] for units in passes]

    def _pair(self, data: DataProto, first: int) -> list[Unit]:
        facts, pair = self._facts, data[[first, first + 1]]
        costs = {"width": facts.width, "all_pairs": facts.all_pairs, "joining": facts.joining}
        units = plan_units(pair, share=facts.shares_prompts, **costs)
        return [replace(unit, rows=[first + row for row in unit.rows]) for unit in units]

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        if self.packed:
            count, width = rows.shape
            tokens_B = torch.bincount(rows.slot_N // width, minlength=count)  # of the answers, in the order of rows
            ends_B = rows.of_tokens(rows.predict_U)[tokens_B.cumsum(0) - 1]
            return {"scores": self.forward_pass(rows.input_ids, rows.position_ids, ends_B)[:, None]}
        assert rows.attention_mask is not None
        real = zip(rows.input_ids, rows.attention_mask.bool(), strict=True)
        return {"scores": self.forward_pass([ids[mask][:-1].tolist() for ids, mask in real])[:, None]}
