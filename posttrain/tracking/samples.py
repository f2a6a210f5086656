"""samples/step_N.parquet: every response of a step with its tokens, log-probs and scores, for reading.

One row per response, zstd; a conversation with branches has one for each of them (`branch`, `parent`, `fork`), all with
the same `uid`, `sample` and score. Lists are cut to the row's own length: `prompt_ids` without padding, and
`response_ids`, `response_mask`, `*_log_probs`, `advantages`, `entropy` position by position. Equal input gives equal
bytes.
`length`, `advantage` and `mismatch` summarise lists, so that sorting and filtering need not read them. Responses of a
validation are in samples/val_N.parquet.

vocabulary.parquet has the bytes of each token id (row i is token i), so that samples can be read token by token without
the model's tokenizer, which may be on another machine. Bytes, because a character may be spread over several tokens.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.texts import utf8
from posttrain.tracking.metrics import Fields, as_numpy
from posttrain.tracking.safe_files import is_plain, replace_file

_FLOAT_LISTS = {
    "rollout_log_probs": ("rollout_log_probs",),
    "old_log_probs": ("old_log_probs",),
    "new_log_probs": ("new_log_probs",),
    "ref_log_probs": ("ref_log_prob", "ref_log_probs"),
    "advantages": ("advantages",),
    "entropy": ("entropy", "entropys"),
}
# Column of the file -> the names that it may have in a batch, in the file's order.
_TEXTS = {
    name: (name,)
    for name in (
        *("uid", "data_source", "prompt", "response", "ground_truth", "reward_parts", "error", "finish_reason"),
        *("policy_versions", "extra_info", "tool_calls", "call_seconds", "turn_rewards", "turn_ends", "own_words"),
    )
} | {"response": ("response_text", "response"), "error": ("reward_error",)}
_NUMBERS = {"seed": "seed", "data_row": "index", "num_turns": "num_turns"}
_NUMBERS |= {"branch": "branch", "parent": "parent", "fork": "fork"}  # of conversations
_OTHERS = ("responses", "response_mask", "attention_mask", "prompts", "sample")
_OTHERS += ("token_level_scores", "token_level_rewards", "reward_score")
ROWS_AT_ONCE = 256  # rows of a parquet row group: the viewer reads one group to show one response


def write_samples(
    folder: str | os.PathLike[str], step: int, batch: Any, *, sampling: Mapping[str, Any] | None = None
) -> Path:
    """Write `step_<step>.parquet` into `folder` and return it; `batch` is a DataProto or one mapping of columns.

    Texts are the columns `prompt` and `response` (or `response_text`); log-probs, advantages and entropy are written
    when present. `sampling` are the settings that all responses were sampled with.
    """
    return write_step(folder, step, sample_table(step, batch, sampling=sampling))


def write_step(folder: str | os.PathLike[str], step: int, table: pa.Table) -> Path:
    """Write `step_<step>.parquet` from its table."""
    path = Path(folder) / f"step_{step}.parquet"
    _write(path, table)
    return path


def write_validation(folder: str | os.PathLike[str], step: int, tables: Sequence[pa.Table]) -> Path:
    """Write `val_<step>.parquet` from the tables of a validation's batches."""
    path = Path(folder) / f"val_{step}.parquet"
    _write(path, pa.concat_tables(tables, promote_options="default"))
    return path


def used_fields(names: Iterable[str]) -> list[str]:
    """The columns of a batch that its samples are made of."""
    spellings = (name for found in (*_FLOAT_LISTS.values(), *_TEXTS.values()) for name in found)
    used = {*spellings, *_NUMBERS.values(), *_OTHERS}
    return [name for name in names if name in used]


def sample_table_in_parts(step: int, batch: Any, *, sampling: Mapping[str, Any] | None = None) -> pa.Table:
    """As `sample_table` of a DataProto whose rows lie elsewhere: some of them are in memory at a time."""
    numbers = _sample_numbers(Fields(batch), len(batch))
    starts = range(0, len(batch), ROWS_AT_ONCE)
    tables = [
        sample_table(step, batch[at : at + ROWS_AT_ONCE], sampling=sampling, numbers=numbers[at : at + ROWS_AT_ONCE])
        for at in starts
    ]
    return pa.concat_tables(tables, promote_options="default")


def sample_table(
    step: int, batch: Any, *, sampling: Mapping[str, Any] | None = None, numbers: Sequence[int] | None = None
) -> pa.Table:
    """The table that `write_samples` writes; `numbers` of the samples within their groups are counted if not given."""
    fields = Fields(batch)
    responses, mask = fields.raw("responses"), fields.raw("response_mask")
    if responses is None or mask is None:
        raise KeyError("samples need the columns responses and response_mask")
    ids, mask = as_numpy(responses, np.int64), as_numpy(mask, np.int64)
    rows, width = ids.shape
    attention = fields.raw("attention_mask")
    attention = None if attention is None else as_numpy(attention, np.int64)
    # Where the response ends, tool results included: the mask alone ends with the last token that the policy wrote.
    ends = _ends(mask if attention is None else np.maximum(attention[:, -width:] if width else mask, mask))

    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * rows, pa.int64()),
        "sample": pa.array(_sample_numbers(fields, rows) if numbers is None else numbers, pa.int64()),
    }
    for name, spellings in _TEXTS.items():
        values = fields.objects(*spellings)
        columns[name] = pa.array([None] * rows if values is None else _texts(values), pa.string())
    columns["sampling"] = pa.array(_texts([None if sampling is None else dict(sampling)] * rows), pa.string())
    for name, spelling in _NUMBERS.items():
        columns[name] = pa.array(fields.objects(spelling) or [None] * rows, pa.int64())
    columns["score"] = pa.array(_scores(fields, columns["sample"].to_pylist()), pa.float64())
    prompts = fields.raw("prompts")
    if prompts is not None:
        columns["prompt_ids"] = _prompt_ids(as_numpy(prompts, np.int64), attention)
    columns["response_ids"] = _ragged(ids, ends, pa.int64())
    columns["response_mask"] = _ragged(mask, ends, pa.int8())
    for name, spellings in _FLOAT_LISTS.items():
        values = fields.raw(*spellings)
        if values is not None:
            columns[name] = _ragged(as_numpy(values, np.float32), ends, pa.float32())
    return pa.table(columns | _in_one_number(fields, mask))


def _sample_numbers(fields: Fields, rows: int) -> list[int]:
    samples = fields.objects("sample") if fields.raw("branch") is not None else None
    return _numbers_within(fields.objects("uid") or list(range(rows))) if samples is None else samples


def _scores(fields: Fields, samples: list[int]) -> Any:
    on_tokens = fields.numbers("token_level_scores", "token_level_rewards")
    if on_tokens is None:
        scores = fields.objects("reward_score")
        return [None] * len(samples) if scores is None else [float(score) for score in scores]
    on_rows = on_tokens.sum(axis=1)
    if fields.raw("branch") is None:
        return on_rows
    # The last row of a sample has its score; all of them show it.
    keys = list(zip(fields.objects("uid") or [], samples, strict=True))
    whole: dict[Any, float] = {}
    for key, score in zip(keys, on_rows, strict=True):
        whole[key] = whole.get(key, 0.0) + score
    return [whole[key] for key in keys]


def _in_one_number(fields: Fields, mask_BT: np.ndarray) -> dict[str, pa.Array]:
    # Tokens that the policy sampled, mean advantage, largest difference of rollout and trainer log-probs.
    written = mask_BT > 0
    found = {"length": pa.array(written.sum(axis=1), pa.int32())}
    advantages = fields.numbers("advantages")
    if advantages is not None:
        sums = np.where(written, advantages, 0.0).sum(axis=1)
        found["advantage"] = pa.array(sums / np.maximum(written.sum(axis=1), 1), pa.float32())
    rollout = fields.numbers("rollout_log_probs")
    old, ours = fields.numbers("old_log_probs"), fields.numbers("old_log_probs", "new_log_probs")
    # Old log-probs may be a copy of the rollout's, whose mismatch of 0 would mean nothing.
    copied = old is not None and rollout is not None and np.array_equal(old, rollout)
    if ours is not None and rollout is not None and not copied:
        found["mismatch"] = pa.array(np.where(written, abs(ours - rollout), 0.0).max(axis=1, initial=0.0), pa.float32())
    return found


def thin_samples(folder: str | os.PathLike[str], max_bytes: float) -> None:
    """Shrink the sample files to `max_bytes`: first groups of the oldest files, down to one each, then whole files."""
    # The oldest first: a run is looked at near its end, and one group of each step still shows how it began.
    paths = sorted([*sample_files(folder), *validation_files(folder)], key=step_of)
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
    return _files(folder, "step")


def validation_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files with the responses of validations, oldest first."""
    return _files(folder, "val")


def step_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def _files(folder: str | os.PathLike[str], kind: str) -> list[Path]:
    paths = Path(folder).glob(f"{kind}_*.parquet")
    return sorted((path for path in paths if re.fullmatch(rf"{kind}_\d+\.parquet", path.name)), key=step_of)


def _thin(path: Path, excess: float) -> None:
    # Drop groups of one file, evenly over it, so that about `excess` bytes are saved; one group stays.
    table = pq.read_table(path)
    uids = table["uid"].to_pylist()
    groups = list(dict.fromkeys(uids))
    size = path.stat().st_size
    # Compressed size is not proportional to rows: drop by estimate, measure, and repeat until the file is small enough.
    while len(groups) > 1 and path.stat().st_size > size - excess:
        share = max(0.0, (size - excess) / path.stat().st_size)
        count = max(1, min(int(len(groups) * share), len(groups) - 1))
        groups = [groups[i * len(groups) // count] for i in range(count)]
        kept = set(groups)
        # Whole groups: advantages mean something only beside the other responses to the same prompt.
        _write(path, table.filter(pa.array([uid in kept for uid in uids])))


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    how: Any = {"compression": "zstd", "row_group_size": ROWS_AT_ONCE}
    replace_file(path, lambda temporary: pq.write_table(table, temporary, **how))


def _total(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def _ends(present_BT: np.ndarray) -> np.ndarray:
    # One past the last marked position of each row, 0 without one.
    width = present_BT.shape[1]
    # argmax gives the first mark of the reversed row, which is the last of the row.
    last = width - np.argmax(present_BT[:, ::-1] > 0, axis=1) if width else np.zeros(len(present_BT), np.int64)
    return np.where((present_BT > 0).any(axis=1), last, 0)


def _ragged(values_BT: np.ndarray, ends: np.ndarray, kind: pa.DataType) -> pa.Array:
    keep = np.arange(values_BT.shape[1])[None, :] < ends[:, None]
    # Arrow stores lists as one flat array with offsets; indexing by `keep` flattens row after row, as that wants it.
    offsets = pa.array(np.concatenate([[0], np.cumsum(ends)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values_BT[keep], kind))


def _prompt_ids(prompts_BP: np.ndarray, attention: np.ndarray | None) -> pa.Array:
    present = np.ones_like(prompts_BP) if attention is None else attention[:, : prompts_BP.shape[1]]
    rows = [ids[marks > 0] for ids, marks in zip(prompts_BP, present, strict=True)]
    return pa.array(rows, pa.list_(pa.int64()))


def _numbers_within(uids: list[Any]) -> list[int]:
    seen: dict[Any, int] = {}
    numbers = []
    for uid in uids:
        numbers.append(seen.get(uid, 0))
        seen[uid] = numbers[-1] + 1
    return numbers


def _texts(values: list[Any]) -> list[str | None]:
    # Rows of a group share their prompt: convert each object once.
    known: dict[int, str | None] = {}  # by identity: values may be dicts, and comparing long texts costs more
    for value in values:
        if id(value) not in known:
            known[id(value)] = _text(value)
    return [known[id(value)] for value in values]


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return utf8(value if isinstance(value, str) else _json(value)).decode()  # parquet holds no lone surrogates


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    except TypeError:  # names of several kinds have no order
        return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


# -- vocabulary.parquet ------------------------------------------------------------------------------------------------
NAME = "vocabulary.parquet"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def write_vocabulary(folder: Path, tokenizer: Any) -> Path:
    """Write the tokens of `tokenizer` into a run's folder."""
    path = folder / NAME
    table = pa.table({"token": pa.array(token_bytes(tokenizer), pa.binary())})
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd", use_dictionary=False))
    return path


def read_vocabulary(folder: Path) -> list[bytes]:
    """The tokens; empty if there is no readable file."""
    if not is_plain(folder / NAME):
        return []
    try:
        tokens = pq.read_table(folder / NAME)["token"].cast(pa.binary()).to_pylist()
    except (OSError, pa.ArrowException, KeyError):
        return []
    return [token or b"" for token in tokens]


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes by token id; unused ids are empty."""
    pieces = tokenizer.get_vocab()
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    # Ids may have gaps, and added tokens may lie above the vocabulary.
    tokens = [b""] * (max([*pieces.values(), *added], default=-1) + 1)
    of_piece = _from_bytes() if _is_byte_level(tokenizer) else _from_words
    for piece, number in pieces.items():
        tokens[number] = of_piece(piece)
    for number, text in added.items():
        tokens[number] = utf8(text)
    return tokens


def _is_byte_level(tokenizer: Any) -> bool:
    # In GPT-2, Qwen and Llama 3 every character of a piece encodes one byte.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_decoder")
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _from_bytes():
    # GPT-2's table: printable bytes encode themselves, the others are the characters from U+0100 on, in order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def of_piece(piece: str) -> bytes:
        return bytes(table[char] for char in piece) if all(char in table for char in piece) else utf8(piece)

    return of_piece


def _from_words(piece: str) -> bytes:
    # Pieces of SentencePiece (`▁` for a blank, `<0x0A>` for a byte), or plain words.
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else utf8(piece.replace("▁", " "))
