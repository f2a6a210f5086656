"""Responses that stay with the worker that wrote them: the driver gets their lengths, and their texts where a reward
function reads these.

    kept = keep_outputs(outputs, prompts)         on the worker: the tokens go into its store
    to_batch(prompts, kept, pad_token_id)         on the driver: a batch that names them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.batch.columns import Column, Holder, ObjectColumn, RowPlaces, StoredColumn, keep, key_of
from posttrain.batch.compact import token_columns
from posttrain.batch.fields import ROUTES
from posttrain.rollout.base import Output

LOG_PROBS, SAMPLING = "rollout_log_probs", "sampling_log_probs"
Keys = tuple[tuple[int, int], tuple[int, int]]


class StoredSequence(Sequence[Any]):
    """Numbers of a stored response. Their count is known; reading one fetches them."""

    def __init__(self, holder: Holder, row: int, name: str, length: int) -> None:
        self.holder, self.row, self.name, self.length = holder, row, name, length

    def numbers(self) -> np.ndarray:
        places = RowPlaces([self.holder], np.zeros(1, np.int64), np.array([self.row]))
        return places.rows(self.name)[0]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.numbers()[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers().tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numbers(), dtype)


@dataclass
class StoredOutput(Output):
    """A response in a store: `keys` are digests of its prompt and of what is computed of the response, `text` is
    decoded where it was written."""

    holder: Holder | None = None
    row: int = 0
    keys: Keys = ((0, 0), (0, 0))
    text: str | None = None


def keep_outputs(
    outputs: Sequence[Output], prompts: Sequence[Sequence[int]], texts: Sequence[str | None]
) -> list[Output]:
    """These outputs with their tokens, log-probs and routes in this process's store."""
    if not outputs:
        return []
    ids = [np.asarray(output.token_ids, np.int32) for output in outputs]
    asked = [np.asarray(prompt, np.int32) for prompt in prompts]
    columns: dict[str, list[np.ndarray]] = {
        "prompts": asked,
        "responses": ids,
        LOG_PROBS: [np.asarray(output.log_probs, np.float32) for output in outputs],
    }
    if all(output.sampling_log_probs is not None for output in outputs):
        columns[SAMPLING] = [np.asarray(output.sampling_log_probs, np.float32) for output in outputs]
    routes = [output.routes for output in outputs if output.routes is not None]
    if len(routes) == len(outputs):
        # All but the last token: nothing is predicted from it, so the trainer does not compute it either.
        lengths = (len(prompt) + len(own) - 1 for prompt, own in zip(asked, ids, strict=True))
        columns[ROUTES] = [one[:length] for one, length in zip(routes, lengths, strict=True)]
    holder = keep(columns)

    def stored(name: str, row: int) -> Any:
        return StoredSequence(holder, row, name, len(columns[name][row])) if name in columns else None

    return [
        StoredOutput(
            output.id,
            stored("responses", row),
            stored(LOG_PROBS, row),
            output.finish_reason,
            output.versions,
            stored(SAMPLING, row),
            routes=stored(ROUTES, row),
            holder=holder,
            row=row,
            keys=(key_of(asked[row]), key_of(ids[row][:-1])),
            text=text,
        )
        for row, (output, text) in enumerate(zip(outputs, texts, strict=True))
    ]


def columns_of_stored(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Output], pad_token_id: int
) -> tuple[dict[str, Column], dict[str, Any]] | None:
    """(columns, non-tensor columns) of these responses; None where they must be read."""
    stored = [output for output in outputs if isinstance(output, StoredOutput) and output.holder is not None]
    further = {kind: [getattr(output, kind) is not None for output in stored] for kind in (SAMPLING, "routes")}
    # What only some of them have is filled in by reading all: it does not happen within a run.
    if len(stored) < len(outputs) or any(any(has) and not all(has) for has in further.values()):
        return None
    numbers: dict[int, int] = {}
    holder_B = np.array([numbers.setdefault(id(output.holder), len(numbers)) for output in stored])
    holders = list({id(output.holder): output.holder for output in stored if output.holder is not None}.values())
    places = RowPlaces(holders, holder_B, np.array([output.row for output in stored]))
    prompt_B, response_B = (np.fromiter(map(len, rows), np.int64) for rows in (prompts, [x.token_ids for x in stored]))
    widths = int(prompt_B.max()), int(response_B.max())
    keys = tuple(np.array([output.keys[kind] for output in stored], np.int64) for kind in (0, 1))
    columns = token_columns(places, (prompt_B, response_B), widths, pad_token_id, (keys[0], keys[1]))
    for name in (LOG_PROBS, *([SAMPLING] if all(further[SAMPLING]) else [])):
        columns[name] = StoredColumn(places, name, response_B, widths[1], torch.float32)
    return columns, {ROUTES: ObjectColumn(places, ROUTES)} if all(further["routes"]) else {}
