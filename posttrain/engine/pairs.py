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

from posttrain.engine.fsdp import FSDPEngine
from posttrain.engine.packing import Rows, Unit, plan_micro_batches, plan_units
from posttrain.kernels.train import can_train
from posttrain.models.forward import hidden_states
from posttrain.models.scorer import head_scores, own_scores
from posttrain.protocol import DataProto


class PairEngine(FSDPEngine):
    """A scorer and its optimizer. `settings.max_rows` counts pairs here."""

    def scores(self, data: DataProto) -> torch.Tensor:
        """(B,) scores of all rows; no gradient."""
        return self._no_grad_pass(data, 1.0)["scores"][:, 0]

    def _plan(self, data: DataProto) -> list[list[Unit]]:
        """Pairs of each pass, as units that share their beginning or do not."""
        pairs = [self._pair(data, row) for row in range(0, len(data), 2)]
        whole = [Unit([number], [0], sum(unit.tokens for unit in pair)) for number, pair in enumerate(pairs)]
        passes = plan_micro_batches(whole, token_budget=self.settings.token_budget, max_rows=self._max_rows())
        return [[unit for chosen in units for unit in pairs[chosen.rows[0]]] for units in passes]

    def _pair(self, data: DataProto, first: int) -> list[Unit]:
        share = self.packed and self.settings.share_prompts
        all_pairs = not can_train(next(self.module.parameters()))
        units = plan_units(data[[first, first + 1]], share=share, width=self.width, all_pairs=all_pairs)
        return [replace(unit, rows=[first + row for row in unit.rows]) for unit in units]

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        if self.packed:
            hidden = hidden_states(self.module, rows.input_ids, rows.position_ids)
            count, width = rows.shape
            tokens_B = torch.bincount(rows.slot_N // width, minlength=count)  # of the answers, in the order of rows
            ends_B = rows.of_tokens(rows.predict_U)[tokens_B.cumsum(0) - 1]
            return {"scores": head_scores(self.module, rows.states(hidden, ends_B))[:, None]}
        assert rows.attention_mask is not None
        real = zip(rows.input_ids, rows.attention_mask.bool(), strict=True)
        return {"scores": own_scores(self.module, [ids[mask][:-1].tolist() for ids, mask in real])[:, None]}
