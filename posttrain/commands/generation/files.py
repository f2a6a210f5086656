"""What `posttrain generate` writes: parts while it works, so that a killed command continues, and then the result.

TARGET.parts/
  settings.json        what the samples depend on: a run with other settings is rejected
  part_00000.parquet   finished prompts: row of the data, responses, token ids, finish reasons; of several turns more
Each file is complete or absent. When all prompts are finished, the result is made of them and the folder removed.

The result has the data's own rows and columns, and beside them:

| column | value |
|---|---|
| `responses` | the texts, one per sample |
| `finish_reasons` | `stop`, or `length` where the limit cut one off (`turns`: no further turn was allowed) |
| `response_tokens` | the number of tokens of each |
| `own_words` | with tools: the text that the model itself wrote, without tool results; scorers read it |
| `tool_calls` | with tools: the calls of each as JSON, with arguments and answers |
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.commands.generation.loop import Answers
from posttrain.data.rows import DataError, RowTable
from posttrain.errors import UserError
from posttrain.texts import utf8
from posttrain.tracking.rundir import RunDirectoryError, RunLock
from posttrain.tracking.safe_files import replace_file

ROWS, SECONDS = 512, 30.0  # a part is written when it holds this many prompts, or when so much time has passed
SCHEMA = pa.schema(
    {
        "index": pa.int64(),
        "responses": pa.list_(pa.string()),
        "response_ids": pa.list_(pa.list_(pa.int32())),
        "finish_reasons": pa.list_(pa.string()),
        "marks": pa.list_(pa.list_(pa.bool_())),
        "own_words": pa.list_(pa.string()),
        "num_turns": pa.list_(pa.int32()),
        "tool_calls": pa.list_(pa.string()),
        "tool_rewards": pa.list_(pa.float64()),
        "agent_scores": pa.list_(pa.string()),
    }
)


class Parts:
    """The parts of one result. Use `with`: leaving it, for whatever reason, writes what is finished."""

    def __init__(self, target: Path, settings: dict[str, Any], *, overwrite: bool = False) -> None:
        self.folder = parts_folder(target)
        self._settings, self._overwrite = settings, overwrite
        self._lock = RunLock(self.folder / "lock")
        # Finished prompts that are in no part yet. Small parts would make reading them slow, large ones lose work.
        self._open: list[Answers] = []
        self._written = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except RunDirectoryError as error:
            raise UserError(f"{self.folder} is in use: another command is writing this result.") from error
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made: {error}. Name another place with --out.") from error
        try:
            # Under the lock: two commands that start at once must not both decide that nothing is there yet.
            self._claim()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _claim(self) -> None:
        # Start, or continue what an earlier command with the same settings left.
        stored = self.folder / "settings.json"
        if self._overwrite:
            for path in [*self._files(), stored]:
                path.unlink(missing_ok=True)
        if stored.is_file():
            before = json.loads(stored.read_text(encoding="utf-8"))
            now = json.loads(json.dumps(self._settings))  # as it would be read back: tuples are lists, keys are text
            # In one result, samples of two settings could not be distinguished afterwards.
            changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            if changed:
                shown = "; ".join(f"{key} was {_short(before.get(key))}, is {_short(now.get(key))}" for key in changed)
                raise UserError(
                    f"{self.folder} holds an unfinished result of other settings: {shown}. Give the same settings to "
                    "continue with it, --overwrite to begin anew, or another --out."
                )
        else:
            replace_file(stored, json.dumps(self._settings, indent=1).encode())
        # Behind the last one rather than by count: a part may have been removed by hand.
        self._next = 1 + max((int(path.stem[5:]) for path in self._files()), default=-1)

    def __exit__(self, *exc: object) -> None:
        try:
            self.flush()
        finally:
            self._lock.release()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("part_*.parquet"))

    def finished(self) -> list[int]:
        """Rows of the data that are answered already."""
        return [
            index for path in self._files() for index in pq.read_table(path, columns=["index"])["index"].to_pylist()
        ]

    def add(self, answers: Answers) -> None:
        """Keep the responses of one prompt."""
        self._open.append(answers)
        if len(self._open) >= ROWS or time.monotonic() - self._written > SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is finished."""
        self._written = time.monotonic()
        if not self._open:
            return
        columns = {name: [getattr(one, name) for one in self._open] for name in SCHEMA.names}
        table = pa.table(columns, schema=SCHEMA)
        path = self.folder / f"part_{self._next:05d}.parquet"
        try:
            # Written beside its place and renamed: after kill -9 a part is complete or absent.
            replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        except OSError as error:
            self._open = []  # they are made again
            raise UserError(
                f"{path} cannot be written: {error}. The same command continues from what is there."
            ) from error
        self._next += 1
        self._open = []

    def table(self) -> pa.Table:
        """Everything finished, in the order of the data's rows."""
        self.flush()
        return _read_parts(self._files())

    def remove(self) -> None:
        """The result is written: the parts are not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def parts_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.parts")


def finished_table(targets: Sequence[Path]) -> pa.Table:
    """What several workers finished, in the order of the data's rows."""
    return _read_parts([path for target in targets for path in sorted(parts_folder(target).glob("part_*.parquet"))])


def remove_parts(targets: Sequence[Path]) -> None:
    for target in targets:
        shutil.rmtree(parts_folder(target), ignore_errors=True)


def _read_parts(files: Sequence[Path]) -> pa.Table:
    # By the schema: a column that a part lacks becomes null instead of an error.
    tables = [pq.read_table(path, schema=SCHEMA) for path in files]
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).sort_by("index")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


COLUMNS = ("responses", "finish_reasons", "response_tokens")
OF_TURNS = ("own_words", "tool_calls")  # columns of responses with tools
SUFFIXES = (".parquet", ".jsonl")


def check_rows(table: RowTable, path: Path, *, tools: bool = False) -> None:
    """Whether the rows can be written there at all: found out before hours are spent on answering them."""
    taken = [name for name in (*COLUMNS, *(OF_TURNS if tools else ())) if any(name in row for row in table.rows)]
    if taken:
        raise DataError(f"{table.files[0]} has a column `{taken[0]}` already; rename it, or remove it from the rows.")
    if path.suffix == ".parquet":
        _to_arrow(table.rows, path)


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
        made_table = _to_arrow(rows, path)
        replace_file(path, lambda temporary: pq.write_table(made_table, temporary, compression="zstd"))
    else:
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        replace_file(path, utf8("".join(lines)))
    return len(rows)


def _to_arrow(rows: list[dict[str, Any]], path: Path) -> pa.Table:
    # Columns of all rows, in the order of their first use: rows of a JSON file need not have the same ones.
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"--out {path}: a column mixes types, which parquet cannot hold ({error}); give a name that ends in .jsonl"
        ) from error
