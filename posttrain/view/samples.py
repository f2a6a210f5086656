"""Samples of one run: which steps have some, a step's groups, a group's responses, a response's tokens."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.errors import first_line
from posttrain.tracking.samples import NAME, read_vocabulary, sample_files, step_of, validation_files
from posttrain.view.metrics import number
from posttrain.view.sample_file import LIGHT, TEXTS, TOKENS, SampleFile


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
    rows: dict[Any, list[int]] = {}
    for row, uid in enumerate(column["uid"]):
        rows.setdefault(uid, []).append(row)
    same = _common_prefix([column["prompt"][members[0]] or "" for members in rows.values()])
    return [_group(uid, members, column, same) for uid, members in rows.items()]


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
    found = file.take(file.rows_of(uid), (*LIGHT, *TEXTS, "seed"))
    if not found:
        raise NoSamples(f"Step {step} has no group {uid}: it may have been thinned.")
    first = found[0]
    shared = ("uid", "data_row", "data_source", "prompt", "ground_truth", "extra_info", "sampling")
    own = ("sample", "response", "error", "finish_reason", "policy_versions")
    numbers = ("score", "advantage", "mismatch", "length")
    responses = [
        {name: row[name] for name in own}
        | {name: number(row[name]) for name in numbers}
        | {"parts": _parts(row["reward_parts"]), "seed": None if row["seed"] is None else str(row["seed"])}
        for row in found
    ]
    return {name: first[name] for name in shared} | {"step": step, "kind": kind, "responses": responses}


def response(folder: Path, kind: str, step: int, uid: str, sample: int) -> dict[str, Any]:
    """The tokens of one response with their numbers, and those of its prompt."""
    file = open_step(folder, kind, step)
    members = file.rows_of(uid)
    numbered = zip(members, file.take(members, ("sample",)), strict=True)
    rows = [row for row, member in numbered if member["sample"] == sample]
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
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return (
        {name: number(value) if isinstance(value, float) else value for name, value in found.items()}
        if isinstance(found, dict)
        else {}
    )
