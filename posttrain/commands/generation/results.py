"""The file that `posttrain generate` writes: the data's own rows and columns, with the responses beside them.

| column | value |
|---|---|
| `responses` | the texts, one per sample |
| `finish_reasons` | `stop`, or `length` where the limit cut one off (`turns`: no further turn was allowed) |
| `response_tokens` | the number of tokens of each |
| `own_words` | with tools: what the model wrote of each, without what it was told; scorers read it |
| `tool_calls` | with tools: the calls of each as JSON, with arguments and answers |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.data.rows import DataError, RowTable
from posttrain.texts import utf8
from posttrain.tracking.atomic import replace_file

COLUMNS = ("responses", "finish_reasons", "response_tokens")
OF_TURNS = ("own_words", "tool_calls")  # columns of responses with tools
SUFFIXES = (".parquet", ".jsonl")


def check_rows(table: RowTable, path: Path, *, tools: bool = False) -> None:
    """Whether the rows can be written there at all: found out before hours are spent on answering them."""
    taken = [name for name in (*COLUMNS, *(OF_TURNS if tools else ())) if any(name in row for row in table.rows)]
    if taken:
        raise DataError(f"{table.files[0]} has a column `{taken[0]}` already; rename it, or remove it from the rows.")
    if path.suffix == ".parquet":
        _arrow(table.rows, path)


def write_results(path: Path, table: RowTable, answers: pa.Table) -> int:
    """Write the rows that have answers, in their order; gives their number."""
    names = ("index", "responses", "finish_reasons", "response_ids", *OF_TURNS)
    columns = {name: answers[name].to_pylist() for name in names}
    rows: list[dict[str, Any]] = []
    for index, responses, reasons, ids, *of_turns in zip(*columns.values(), strict=True):
        made = {"responses": responses, "finish_reasons": reasons, "response_tokens": [len(one) for one in ids]}
        made |= {name: value for name, value in zip(OF_TURNS, of_turns, strict=True) if value is not None}
        rows.append({**table.rows[index], **made})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        made_table = _arrow(rows, path)
        replace_file(path, lambda temporary: pq.write_table(made_table, temporary, compression="zstd"))
    else:
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        replace_file(path, utf8("".join(lines)))
    return len(rows)


def _arrow(rows: list[dict[str, Any]], path: Path) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"--out {path}: a column mixes types, which parquet cannot hold ({error}); give a name that ends in .jsonl"
        ) from error
