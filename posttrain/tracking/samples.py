"""samples/step_N.parquet: every response of a step with its tokens, log-probs and scores, for looking at.

One row per response, zstd. Lists are cut to the row's own length: `prompt_ids` without padding, and `response_ids`,
`response_mask`, `*_log_probs`, `advantages`, `entropy` position by position. Equal input gives equal bytes.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.texts import utf8
from posttrain.tracking.atomic import replace_file
from posttrain.tracking.fields import Fields, as_numpy

_FLOAT_LISTS = {
    "rollout_log_probs": ("rollout_log_probs",),
    "old_log_probs": ("old_log_probs",),
    "ref_log_probs": ("ref_log_prob", "ref_log_probs"),
    "advantages": ("advantages",),
    "entropy": ("entropy", "entropys"),
}
_TEXTS = {
    "uid": ("uid",),
    "data_source": ("data_source",),
    "prompt": ("prompt",),
    "response": ("response_text", "response"),
    "ground_truth": ("ground_truth",),
    "reward_parts": ("reward_parts",),
    "error": ("reward_error",),
    "finish_reason": ("finish_reason",),
    "policy_versions": ("policy_versions",),
}


def write_samples(folder: str | os.PathLike[str], step: int, batch: Any) -> Path:
    """Write `step_<step>.parquet` into `folder` and return it; `batch` is a DataProto or one mapping of columns.

    Texts are the columns `prompt` and `response` (or `response_text`); log-probs, advantages and entropy are written
    when present.
    """
    path = Path(folder) / f"step_{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, sample_table(step, batch))
    return path


def sample_table(step: int, batch: Any) -> pa.Table:
    """The table that `write_samples` writes."""
    fields = Fields(batch)
    responses, mask = fields.raw("responses"), fields.raw("response_mask")
    if responses is None or mask is None:
        raise KeyError("samples need the columns responses and response_mask")
    ids, mask = as_numpy(responses, np.int64), as_numpy(mask, np.int64)
    rows, width = ids.shape
    attention = fields.raw("attention_mask")
    attention = None if attention is None else as_numpy(attention, np.int64)
    ends = _ends(mask if attention is None else np.maximum(attention[:, -width:] if width else mask, mask))

    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * rows, pa.int64()),
        "sample": pa.array(_numbers_within(fields.objects("uid") or list(range(rows))), pa.int64()),
    }
    for name, spellings in _TEXTS.items():
        values = fields.objects(*spellings)
        columns[name] = pa.array([None] * rows if values is None else [_text(value) for value in values], pa.string())
    scores = fields.numbers("token_level_scores", "token_level_rewards")
    columns["score"] = pa.array([None] * rows if scores is None else scores.sum(axis=1), pa.float64())
    prompts = fields.raw("prompts")
    if prompts is not None:
        columns["prompt_ids"] = _prompt_ids(as_numpy(prompts, np.int64), attention)
    columns["response_ids"] = _ragged(ids, ends, pa.int64())
    columns["response_mask"] = _ragged(mask, ends, pa.int8())
    for name, spellings in _FLOAT_LISTS.items():
        values = fields.raw(*spellings)
        if values is not None:
            columns[name] = _ragged(as_numpy(values, np.float32), ends, pa.float32())
    return pa.table(columns)


def thin_samples(folder: str | os.PathLike[str], max_bytes: float) -> None:
    """Bring the sample files under `max_bytes`: the oldest give up groups first, down to one, then whole files go."""
    paths = sample_files(folder)
    for path in paths:
        if (excess := _total(paths) - max_bytes) <= 0:
            return
        _thin(path, excess)
    for path in paths:
        if _total(paths) <= max_bytes:
            return
        path.unlink()


def sample_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The sample files of a run, oldest step first."""
    found = {path: re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in Path(folder).glob("step_*.parquet")}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(path.stem[5:]))


def _thin(path: Path, excess: float) -> None:
    """Drop groups of one file, evenly over it, so that about `excess` bytes are saved; one group stays."""
    table = pq.read_table(path)
    uids = table["uid"].to_pylist()
    groups = list(dict.fromkeys(uids))
    size = path.stat().st_size
    while len(groups) > 1 and path.stat().st_size > size - excess:
        share = max(0.0, (size - excess) / path.stat().st_size)
        count = max(1, min(int(len(groups) * share), len(groups) - 1))
        groups = [groups[i * len(groups) // count] for i in range(count)]
        kept = set(groups)
        _write(path, table.filter(pa.array([uid in kept for uid in uids])))


def _write(path: Path, table: pa.Table) -> None:
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def _total(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def _ends(present_BT: np.ndarray) -> np.ndarray:
    """One past the last marked position of each row."""
    width = present_BT.shape[1]
    last = width - np.argmax(present_BT[:, ::-1] > 0, axis=1) if width else np.zeros(len(present_BT), np.int64)
    return np.where((present_BT > 0).any(axis=1), last, 0)


def _ragged(values_BT: np.ndarray, ends: np.ndarray, kind: pa.DataType) -> pa.Array:
    keep = np.arange(values_BT.shape[1])[None, :] < ends[:, None]
    offsets = pa.array(np.concatenate([[0], np.cumsum(ends)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values_BT[keep], kind))


def _prompt_ids(prompts_BP: np.ndarray, attention: np.ndarray | None) -> pa.Array:
    present = np.ones_like(prompts_BP) if attention is None else attention[:, : prompts_BP.shape[1]]
    rows = [ids[marks > 0] for ids, marks in zip(prompts_BP, present, strict=True)]
    return pa.array(rows, pa.list_(pa.int64()))


def _numbers_within(uids: list[Any]) -> list[int]:
    """0, 1, 2, ... within each group."""
    seen: dict[Any, int] = {}
    numbers = []
    for uid in uids:
        numbers.append(seen.get(uid, 0))
        seen[uid] = numbers[-1] + 1
    return numbers


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return utf8(text).decode()  # parquet holds no lone surrogates
