"""A train engine for scorers: rows in pairs, one score at each row's end.

A batch holds the better and the worse answer of each pair one after the other. Both are always computed in the same
pass, since the loss of a pair needs both scores; what they have in common at their beginning is computed once, where
that is cheaper. So no split of a batch into passes changes the gradient.

Shapes: B rows, two per pair.
"""

from __future__ import annotations

import torch

from posttrain.engine.fsdp import EngineSettings, FSDPEngine
from posttrain.engine.packing import Rows, Unit, plan_micro_batches, plan_units
from posttrain.models.forward import hidden_states
from posttrain.models.scorer import head_scores, packs_rows, padded_scores
from posttrain.protocol import DataProto


class PairEngine(FSDPEngine):
    """A scorer and its optimizer. `settings.max_rows` counts pairs here."""

    def __init__(self, module: torch.nn.Module, settings: EngineSettings) -> None:
        super().__init__(module, settings)
        self.packed = settings.pack and packs_rows(module)

    def scores(self, data: DataProto) -> torch.Tensor:
        """(B,) scores of all rows; no gradient."""
        return self._no_grad_pass(data, 1.0)["scores"][:, 0]

    def _plan(self, data: DataProto) -> list[list[Unit]]:
        """Pairs of each pass, as units that share their beginning or do not."""
        pairs = [[row, row + 1] for row in range(0, len(data), 2)]
        planned = [self._pair_units(data, pair) for pair in pairs]
        tokens = [size for _, size in planned]
        passes = plan_micro_batches(
            [[number] for number in range(len(pairs))],
            tokens,
            token_budget=self.settings.token_budget,
            max_rows=self.settings.max_rows,
        )
        return [[unit for [number] in chosen for unit in planned[number][0]] for chosen in passes]

    def _pair_units(self, data: DataProto, pair: Unit) -> tuple[list[Unit], int]:
        share = self.packed and self.settings.share_prompts
        units, tokens = plan_units(data[pair], share=share, width=self.width)
        return [[pair[row] for row in unit] for unit in units], sum(tokens)

    def _forward(self, rows: Rows, temperature: float) -> dict[str, torch.Tensor]:
        if self.packed:
            hidden = hidden_states(self.module, rows.input_ids, rows.position_ids)[0]
            return {"scores": head_scores(self.module, hidden.index_select(0, rows.last_B))[:, None]}
        assert rows.attention_mask is not None
        real = zip(rows.input_ids, rows.attention_mask.bool(), strict=True)
        return {"scores": padded_scores(self.module, [ids[mask].tolist() for ids, mask in real])[:, None]}
