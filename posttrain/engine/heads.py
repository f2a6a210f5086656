"""What a model computes on top of its decoder: log-probs of tokens, values of states, or a score for each row.

A head says which numbers it gives and where in a pass they are read; the engines bring the hidden states there. So any
engine trains any head, and a loss sees the same outputs whichever engine computed them.

Shapes: B rows, R response width, U places of a pass whose hidden state is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from posttrain.engine.packing import Rows
from posttrain.models.forward import TokenPass, ValueModel, forward_mode_of
from posttrain.models.scorer import PaddedScorePass, ScorePass
from posttrain.protocol import DataProto


class Head(ABC):
    """Outputs of a model, and how they are read off a pass over packed or padded rows."""

    outputs: tuple[str, ...]  # names of the numbers that a pass gives
    # The linear module from a hidden state to one number; None for logits of a vocabulary.
    projection: str | None = None
    decoder = "model"  # where the decoder's weights lie in a model with this head
    pairs = False  # whether rows come in pairs that must be computed in the same pass

    @abstractmethod
    def torch_pass(self, module: torch.nn.Module, *, packed: bool) -> torch.nn.Module:
        """A module whose `forward` is a whole pass, for FSDP2 to hook into."""

    @abstractmethod
    def inputs(self, rows: Rows, temperature: float) -> tuple[Any, ...]:
        """Arguments of that pass."""

    def places(self, rows: Rows) -> torch.Tensor:
        """(U,) the packed tokens whose hidden states are read."""
        return rows.predict_U

    def per_row(self, rows: Rows, found_U: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a pass gave, as a loss sees it: (B, R) by name."""
        return {name: rows.scatter(values_U) for name, values_U in found_U.items()}

    def shape(self, data: DataProto) -> torch.Size:
        """Of every output of a batch."""
        return data.batch["responses"].shape


class LanguageModelHead(Head):
    """`log_probs` and `entropy` of response tokens."""

    outputs = ("log_probs", "entropy")

    def torch_pass(self, module: torch.nn.Module, *, packed: bool) -> torch.nn.Module:
        return TokenPass(module, split_head=forward_mode_of(module).split_head)

    def inputs(self, rows: Rows, temperature: float) -> tuple[Any, ...]:
        positions = None if rows.layout is None else rows.position_ids  # models count padded rows themselves
        return rows.input_ids, positions, rows.attention_mask, rows.predict_U, rows.label_U, temperature


class ValueHead(LanguageModelHead):
    """`values` of the states before response tokens, for a critic (`ValueModel`)."""

    outputs, projection, decoder = ("values",), "value_head", "base_model"


class ScoreHead(Head):
    """`scores`: one for each row, for reward models, whose rows come in pairs.

    A batch holds the better and the worse answer of each pair one after the other. Both are always computed in the same
    pass, since the loss of a pair needs both scores; the beginning that they share is computed once, where that is
    cheaper. So no split of a batch into passes changes the gradient. `settings.max_rows` of an engine counts pairs.

    Behind each answer stands one more token, which is never computed: the state that would predict it is that of the
    answer's end, and is scored.
    """

    outputs, projection, pairs = ("scores",), "score", True

    def torch_pass(self, module: torch.nn.Module, *, packed: bool) -> torch.nn.Module:
        return ScorePass(module) if packed else PaddedScorePass(module)

    def inputs(self, rows: Rows, temperature: float) -> tuple[Any, ...]:
        if rows.layout is not None:
            return rows.input_ids, rows.position_ids, self.places(rows)
        assert rows.attention_mask is not None
        real = zip(rows.input_ids, rows.attention_mask.bool(), strict=True)
        return ([ids[mask][:-1].tolist() for ids, mask in real],)

    def places(self, rows: Rows) -> torch.Tensor:
        count, width = rows.shape
        tokens_B = torch.bincount(rows.slot_N // width, minlength=count)  # of the answers, in the order of rows
        return rows.of_tokens(rows.predict_U)[tokens_B.cumsum(0) - 1]

    def per_row(self, rows: Rows, found_U: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: scores_B[:, None] for name, scores_B in found_U.items()}

    def shape(self, data: DataProto) -> torch.Size:
        return torch.Size((len(data), 1))


def head_of(module: torch.nn.Module) -> Head:
    """The head that a value model or a language model has."""
    return ValueHead() if isinstance(module, ValueModel) else LanguageModelHead()
