"""Rows of token ids through a model without packing: padded on the right, or one at a time where padding is felt.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from posttrain.models.forward import hidden_states, logits_of, own_logits
from posttrain.models.ways import way_of


def padding(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(ids, mask) of rows padded on the right, with a token that may be any; no mask where nothing is padded."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[row[0]] * (width - len(row))] for row in rows], device=device)
    if all(len(row) == width for row in rows):
        return ids, None
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)


def _parts(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    if way_of(model).padded:
        yield rows
    else:
        yield from ([row] for row in rows)


def next_logits(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """(B, V): logits of the token that follows each row."""
    device, found = next(model.parameters()).device, []
    for part in _parts(model, rows):
        ids, mask = padding(part, device)
        ends = [len(row) - 1 for row in part]
        if way_of(model).split_head:
            found.append(logits_of(model, hidden_states(model, ids, None, mask)[range(len(part)), ends]))
        else:
            found.append(own_logits(model, ids, mask)[range(len(part)), ends])
    return torch.cat(found)


def row_log_probs(
    model: torch.nn.Module, rows: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probs of each row's tokens but the first, by the model's whole forward pass."""
    device, found = next(model.parameters()).device, []
    for part in _parts(model, rows):
        ids, mask = padding(part, device)
        logits = own_logits(model, ids, mask)[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = torch.log_softmax(wide / temperature, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        found += [log_p[place, : len(row) - 1] for place, row in enumerate(part)]
    return found
