"""Samples of one run: which steps have some, a step's groups, a group's responses, a response's tokens.

`SampleFile` reads columns, or single rows without the others. Columns that older versions did not write are computed
from others, or empty.
"""

from __future__ import annotations

import codecs
import json
import math
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from posttrain.errors import first_line
from posttrain.tracking.safe_files import is_plain
from posttrain.tracking.samples import NAME, read_vocabulary, sample_files, step_of, validation_files
from posttrain.view.runs import number


def token_texts(ids: Sequence[int], vocabulary: Sequence[bytes]) -> list[str]:
    """One text per token, which join to the response. A character of several tokens belongs to the last of them.

    Bytes that are no UTF-8 become U+FFFD, ids without bytes their number.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in ids:
        if 0 <= token < len(vocabulary):
            texts.append(decoder.decode(vocabulary[token]))
        else:
            texts.append(decoder.decode(b"", True) + f"⟨{token}⟩")
            decoder.reset()
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts


KINDS = {"step": sample_files, "val": validation_files}
PREVIEW = 160  # characters of a prompt or response in a list
SAME = 40  # a common beginning of all prompts of a step is omitted from this many characters on


class NoSamples(LookupError):
    """Nothing was written, or it has been thinned since."""


def steps(folder: Path) -> dict[str, list[int]]:
    """The steps with samples of training, and of validation."""
    return {kind: [step_of(path) for path in files(folder / "samples")] for kind, files in KINDS.items()}


def open_step(folder: Path, kind: str, step: int) -> SampleFile:
    """The file of a step; a running run may have thinned it."""
    if kind not in KINDS:
        raise NoSamples(f"There are samples of steps and of validations (val), not of `{kind}`.")
    path = folder / "samples" / f"{kind}_{int(step)}.parquet"
    try:
        return _open_cached(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise NoSamples(
            f"{folder} has no samples of step {step} (tracking.samples_freq, tracking.samples_max_gb)."
        ) from error
    except pa.ArrowException as error:
        raise NoSamples(f"The samples of step {step} cannot be read: {first_line(error)}.") from error


@lru_cache(maxsize=8)
def _open_cached(path: Path, changed: int) -> SampleFile:
    # Cached: the next question is usually about the same step.
    return SampleFile(path)


def groups(folder: Path, kind: str, step: int) -> list[dict[str, Any]]:
    """One entry per prompt of a step, in order."""
    table = open_step(folder, kind, step).columns((*LIGHT, "prompt"))
    column = {name: table[name].to_pylist() for name in (*LIGHT, "prompt")}
    rows: dict[Any, dict[Any, int]] = {}
    for row, (uid, sample) in enumerate(zip(column["uid"], column["sample"], strict=True)):
        rows.setdefault(uid, {})[sample] = row  # of a conversation with branches the last row: it ended there
    groups = {uid: list(members.values()) for uid, members in rows.items()}
    same = _common_prefix([column["prompt"][members[0]] or "" for members in groups.values()])
    return [_group(uid, members, column, same) for uid, members in groups.items()]


def _common_prefix(prompts: list[str]) -> int:
    # The common beginning of all prompts (system prompt, tools, instruction) would fill every line of the list.
    first, last = min(prompts, default=""), max(prompts, default="")  # what these share, all do
    length = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    while length and first[length - 1].isalnum():  # whole words
        length -= 1
    return length if length >= SAME else 0


def _group(uid: Any, rows: list[int], column: dict[str, list[Any]], same: int) -> dict[str, Any]:
    scores = [column["score"][row] for row in rows]
    known = [score for score in scores if score is not None and math.isfinite(score)]
    lengths = [column["length"][row] or 0 for row in rows]
    gaps = [column["mismatch"][row] for row in rows if column["mismatch"][row] is not None]
    return {
        "uid": uid,
        "data_row": column["data_row"][rows[0]],
        "prompt": "… " * bool(same) + preview((column["prompt"][rows[0]] or "")[same:]),
        "scores": [number(score) for score in scores],
        "mean": number(float(np.mean(known))) if known else None,
        "length": number(float(np.mean(lengths))),
        "mismatch": number(max(gaps)) if gaps else None,
        "truncated": sum(column["finish_reason"][row] == "length" for row in rows),
        "failed": sum(column["error"][row] is not None for row in rows),
    }


def group(folder: Path, kind: str, step: int, uid: str) -> dict[str, Any]:
    """A prompt and its responses with all columns except tokens."""
    file = open_step(folder, kind, step)
    found = file.take(file.rows_of(uid), (*LIGHT, *TEXTS, *BRANCHES, *TURNS, "seed"))
    if not found:
        raise NoSamples(f"Step {step} has no group {uid}: it may have been thinned.")
    first = found[0]
    shared = ("uid", "data_row", "data_source", "prompt", "ground_truth", "extra_info", "sampling")
    own = ("sample", *BRANCHES, "response", "error", "finish_reason", "policy_versions")
    numbers = ("score", "advantage", "mismatch", "length")
    responses = [
        {name: row[name] for name in own}
        | {name: number(row[name]) for name in numbers}
        | {"parts": _parts(row["reward_parts"]), "seed": None if row["seed"] is None else str(row["seed"])}
        | ({"turns": turns_of(row, vocabulary(folder))} if row["num_turns"] else {})
        for row in found
    ]
    return {name: first[name] for name in shared} | {"step": step, "kind": kind, "responses": responses}


def turns_of(row: dict[str, Any], known: Sequence[bytes]) -> list[dict[str, Any]]:
    """A row of a conversation in pieces: what it shares with another branch, the model's turns, and what it read.

    Each has `by` (shared, model, read), its text and number of tokens; a turn also its number, reward and calls.
    """
    ids, mask = row["response_ids"] or [], row["response_mask"] or []
    texts = token_texts(ids, known)
    shared = max(0, (row["fork"] or 0) - len(row["prompt_ids"] or ())) if row["parent"] is not None else 0
    # Runs of earlier versions: turns are known where something was read between them.
    ends = _stored(row["turn_ends"], list) or [(n, end) for n, end in enumerate(_mask_ends(mask))]
    calls = _stored(row["tool_calls"], list)
    for call, seconds in zip(calls, _stored(row["call_seconds"], list), strict=False):
        call["seconds"] = number(seconds)
    rewards = dict(_stored(row["turn_rewards"], list))
    pieces: list[dict[str, Any]] = []

    def add(by: str, start: int, end: int, **more: Any) -> None:
        if end > start:
            pieces.append({"by": by, "text": "".join(texts[start:end]), "tokens": end - start, **more})

    at = min(shared, len(ids))
    add("shared", 0, at)
    for turn, end in ends:
        start = next((place for place in range(at, end) if mask[place]), end)
        add("read", at, start)
        made = [{name: call.get(name) for name in CALL} for call in calls if call.get("turn") == turn + 1]
        reward = number(rewards.get(turn))
        add("model", start, end, turn=turn + 1, **({"reward": reward} if reward is not None else {}), calls=made)
        at = max(at, end)
    add("read", at, len(ids))
    return pieces


def _mask_ends(mask: Sequence[int]) -> list[int]:
    return [place + 1 for place, own in enumerate(mask) if own and not (place + 1 < len(mask) and mask[place + 1])]


def _stored(text: str | None, kind: type) -> Any:
    # The JSON value of a column; an empty one if there is none of this kind.
    try:
        found = json.loads(text) if text else None
    except ValueError:
        found = None
    return found if isinstance(found, kind) else kind()


def response(folder: Path, kind: str, step: int, uid: str, sample: int, branch: int | None = None) -> dict[str, Any]:
    """The tokens of one response (with `branch`, of one of its rows) with their numbers, and those of its prompt."""
    file = open_step(folder, kind, step)
    members = file.rows_of(uid)
    numbered = zip(members, file.take(members, ("sample", "branch")), strict=True)
    rows = [row for row, one in numbered if one["sample"] == sample and branch in (None, one["branch"])]
    if not rows:
        raise NoSamples(f"Step {step} has no response {uid}/{sample}: it may have been thinned.")
    row = file.take(rows[:1], (*TOKENS, "prompt_ids"))[0]
    known = vocabulary(folder)
    numbers = {name: [number(value) for value in row[name]] for name in TOKENS[1:] if row[name] is not None}
    return {
        "ids": row["response_ids"],
        "texts": token_texts(row["response_ids"] or [], known),
        "prompt_texts": token_texts(row["prompt_ids"] or [], known),
        "numbers": numbers,
    }


def vocabulary(folder: Path) -> list[bytes]:
    """The run's tokens, read once."""
    try:
        changed = (folder / NAME).stat().st_mtime_ns
    except OSError:
        return []
    return _vocabulary(folder, changed)


@lru_cache(maxsize=4)
def _vocabulary(folder: Path, changed: int) -> list[bytes]:
    return read_vocabulary(folder)


def preview(text: str | None) -> str:
    """The beginning of a text, in one line."""
    return " ".join((text or "")[: 2 * PREVIEW].split())[:PREVIEW]


def _parts(text: str | None) -> dict[str, Any]:
    found = _stored(text, dict)
    return {name: number(value) if isinstance(value, float) else value for name, value in found.items()}


MOST_ROWS = 4_000_000  # responses of one step
pc: Any = pyarrow.compute  # its functions are created at run time, unseen by type checkers
BRANCHES = ("branch", "parent", "fork")
TURNS = (
    "num_turns",
    "tool_calls",
    "call_seconds",
    "turn_rewards",
    "turn_ends",
    "prompt_ids",
    "response_ids",
    "response_mask",
)
CALL = ("name", "arguments", "error", "seconds")
LIGHT = ("uid", "sample", "score", "length", "advantage", "mismatch", "finish_reason", "error", "data_row")
TEXTS = (
    "prompt",
    "response",
    "ground_truth",
    "data_source",
    "extra_info",
    "sampling",
    "reward_parts",
    "policy_versions",
)
TOKENS = (
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "new_log_probs",
    "ref_log_probs",
    "advantages",
    "entropy",
)


class SampleFile:
    """A step's responses. Opening reads the file's footer alone."""

    def __init__(self, path: Path) -> None:
        if not is_plain(path):  # opening a named pipe would wait forever
            raise FileNotFoundError(f"{path.name} is not a file")
        self._file, self._lock = pq.ParquetFile(path, memory_map=True), threading.Lock()
        self._uids: Any = None
        self.names = set(self._file.schema_arrow.names)
        self.rows = self._file.metadata.num_rows
        if self.rows > MOST_ROWS:  # a few bytes of parquet can encode any number of equal rows
            raise pa.ArrowInvalid(f"{path.name} holds {self.rows:,} responses; at most {MOST_ROWS:,} are read")

    def columns(self, names: Iterable[str], groups: list[int] | None = None) -> pa.Table:
        """These columns, of all rows or of some row groups; absent ones are null."""
        names = list(names)
        made_of = {name: _MADE[name][0] for name in names if name in _MADE and name not in self.names}
        sources = [source for needed in made_of.values() for source in needed]
        wanted = [name for name in dict.fromkeys([*names, *sources]) if name in self.names]
        with self._lock:  # requests in several threads may read the same file
            if groups is None:
                table = self._file.read(columns=wanted, use_threads=False)
            else:
                table = self._file.read_row_groups(groups, columns=wanted, use_threads=False)
        found = {name: table[name] for name in names if name in self.names}
        for name, needed in made_of.items():
            if set(needed) <= self.names:
                found[name] = _MADE[name][1](*(table[source].combine_chunks() for source in needed))
        return pa.table({name: found.get(name, pa.nulls(len(table))) for name in names})

    def rows_of(self, uid: str) -> list[int]:
        """Numbers of the rows of a group, in the order of its samples."""
        if self._uids is None:
            self._uids = self.columns(("uid",))["uid"]
        return np.flatnonzero(pc.fill_null(pc.equal(self._uids, uid), False).to_numpy(zero_copy_only=False)).tolist()

    def take(self, rows: list[int], names: Iterable[str]) -> list[dict[str, Any]]:
        """Single rows as dicts; only the row groups that hold them are read."""
        ends = np.cumsum([self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)])
        group_of = np.searchsorted(ends, rows, side="right")
        groups = sorted(set(group_of.tolist()))
        sizes = {group: int(ends[group] - (ends[group - 1] if group else 0)) for group in groups}
        starts, total = {}, 0
        for group in groups:
            starts[group], total = total, total + sizes[group]
        places = [
            starts[group] + row - int(ends[group] - sizes[group])
            for row, group in zip(rows, group_of.tolist(), strict=True)
        ]
        return self.columns(names, groups).take(pa.array(places, pa.int64())).to_pylist() if rows else []


def _lengths(mask: Any) -> Any:
    return pa.array(_row_sums(mask, mask.values.to_numpy(zero_copy_only=False)), pa.int64())


def _advantages(advantages: Any, mask: Any) -> Any:
    written = mask.values.to_numpy(zero_copy_only=False)
    sums = _row_sums(advantages, advantages.values.to_numpy(zero_copy_only=False) * written)
    return pa.array(sums / np.maximum(_row_sums(mask, written), 1), pa.float32())


def _mismatches(ours: Any, rollout: Any, mask: Any) -> Any:
    gaps = abs(ours.values.to_numpy(zero_copy_only=False) - rollout.values.to_numpy(zero_copy_only=False))
    gaps = np.where(mask.values.to_numpy(zero_copy_only=False) > 0, gaps, 0)
    offsets = ours.offsets.to_numpy()
    return pa.array([gaps[a:b].max(initial=0.0) for a, b in pairwise(offsets)], pa.float32())


def _row_sums(lists: Any, values: np.ndarray) -> np.ndarray:
    # Lists lie end to end in one array: differences of one cumulative sum, not a loop over responses.
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    offsets = lists.offsets.to_numpy()
    return sums[offsets[1:]] - sums[offsets[:-1]]


_MADE: dict[str, tuple[tuple[str, ...], Any]] = {
    "length": (("response_mask",), _lengths),
    "advantage": (("advantages", "response_mask"), _advantages),
    "mismatch": (("old_log_probs", "rollout_log_probs", "response_mask"), _mismatches),
}
