"""Sample files: exact, equal for equal input, thinned by whole groups."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.protocol import DataProto
from posttrain.tracking.samples import (
    sample_files,
    sample_table,
    thin_samples,
    validation_files,
    write_samples,
    write_validation,
)

GROUPS, N, PROMPT, WIDTH = 4, 3, 5, 8


def batch(seed: int = 0, groups: int = GROUPS, width: int = WIDTH) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    rows = groups * N
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    prompt_mask = (torch.arange(PROMPT)[None] >= torch.randint(0, PROMPT, (rows, 1), generator=generator)).long()
    scores = torch.zeros(rows, width)
    scores[torch.arange(rows), lengths - 1] = torch.arange(rows) / 8
    tensors = {
        "prompts": torch.randint(5, 99, (rows, PROMPT), generator=generator) * prompt_mask,
        "responses": torch.randint(5, 99, (rows, width), generator=generator) * mask,
        "response_mask": mask,
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "token_level_scores": scores,
        "rollout_log_probs": -torch.rand(rows, width, generator=generator),
        "old_log_probs": -torch.rand(rows, width, generator=generator),
        "advantages": torch.randn(rows, width, generator=generator),
    }
    objects = {
        "uid": [f"u{row // N}" for row in range(rows)],
        "prompt": [f"question {row // N}" for row in range(rows)],
        "response_text": [f"answer {row} ä" for row in range(rows)],
        "ground_truth": ["42", 42, None, [1, 2]] * (rows // 4),
        "data_source": ["sums"] * rows,
        "reward_parts": [{"b": 1.0, "a": "x"}] * rows,
        "reward_error": [None] * (rows - 1) + ["hung"],
        "finish_reason": ["stop"] * rows,
        "policy_versions": [[0, 1]] * rows,
    }
    return DataProto.from_dict(tensors, {k: np.array([*v, None], dtype=object)[:-1] for k, v in objects.items()})


def test_rows_hold_tokens_without_padding_and_exact_numbers(tmp_path):
    data = batch()
    path = write_samples(tmp_path, 7, data)
    rows = pq.read_table(path).to_pylist()
    assert path.name == "step_7.parquet" and len(rows) == GROUPS * N
    for i, row in enumerate(rows):
        length = int(data.batch["response_mask"][i].sum())
        assert row["step"] == 7 and row["uid"] == f"u{i // N}" and row["sample"] == i % N
        assert row["response_ids"] == data.batch["responses"][i, :length].tolist()
        assert row["prompt_ids"] == [t for t in data.batch["prompts"][i].tolist() if t]
        assert row["old_log_probs"] == data.batch["old_log_probs"][i, :length].tolist()  # float32 to the bit
        assert row["advantages"] == data.batch["advantages"][i, :length].tolist()
        assert row["response_mask"] == [1] * length and row["score"] == i / 8
        assert row["response"] == f"answer {i} ä" and json.loads(row["reward_parts"]) == {"a": "x", "b": 1.0}
    assert [row["ground_truth"] for row in rows[:4]] == ["42", "42", None, "[1, 2]"]
    assert rows[-1]["error"] == "hung" and rows[0]["error"] is None and rows[0]["policy_versions"] == "[0, 1]"
    assert "ref_log_probs" not in rows[0] and "entropy" not in rows[0]  # absent from the batch


def test_tokens_between_turns_stay_with_their_mask(tmp_path):
    tensors = {
        "responses": torch.tensor([[1, 2, 3, 4, 0]]),
        "response_mask": torch.tensor([[1, 0, 0, 1, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "ref_log_prob": torch.tensor([[-1.0, 0, 0, -2, 0]]),
    }
    row = pq.read_table(write_samples(tmp_path, 1, tensors)).to_pylist()[0]
    assert row["response_ids"] == [1, 2, 3, 4] and row["response_mask"] == [1, 0, 0, 1]
    assert row["ref_log_probs"] == [-1.0, 0, 0, -2] and row["score"] is None


def test_equal_input_gives_equal_bytes_and_other_input_other_bytes(tmp_path):
    first = write_samples(tmp_path / "a", 1, batch()).read_bytes()
    assert write_samples(tmp_path / "b", 1, batch()).read_bytes() == first
    assert write_samples(tmp_path / "c", 1, batch(seed=1)).read_bytes() != first


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_samples(tmp_path, 1, batch())
    before = path.read_bytes()
    monkeypatch.setattr(pq, "write_table", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_samples(tmp_path, 1, batch(seed=1))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["step_1.parquet"]


def test_thinning_drops_whole_groups_oldest_first(tmp_path):
    sizes = {}
    for step in (2, 10, 9):
        sizes[step] = write_samples(tmp_path, step, batch(step, groups=32, width=64)).stat().st_size
    total = sum(sizes.values())
    newest = (tmp_path / "step_10.parquet").read_bytes()
    limit = total - sizes[2] // 2
    thin_samples(tmp_path, limit)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    assert [p.name for p in sample_files(tmp_path)] == ["step_2.parquet", "step_9.parquet", "step_10.parquet"]
    oldest = pq.read_table(tmp_path / "step_2.parquet")["uid"].to_pylist()
    assert 0 < len(set(oldest)) < 32 and all(oldest.count(uid) == N for uid in oldest)
    assert len(pq.read_table(tmp_path / "step_9.parquet")) == 32 * N
    assert (tmp_path / "step_10.parquet").read_bytes() == newest

    small = write_samples(tmp_path / "small", 1, batch(1, groups=4, width=64)).stat().st_size
    shutil.rmtree(tmp_path / "small")
    thin_samples(tmp_path, sizes[10] + 2 * small)  # every old file keeps one group as long as there is room for it
    left = [len(pq.read_table(p)) for p in sample_files(tmp_path)]
    assert left[0] == N and N <= left[1] < 8 * N and left[2] == 32 * N
    thin_samples(tmp_path, 0)
    assert sample_files(tmp_path) == []


def test_nothing_is_touched_below_the_limit(tmp_path):
    path = write_samples(tmp_path, 1, batch())
    before = path.stat().st_mtime_ns
    thin_samples(tmp_path, 10**9)
    assert path.stat().st_mtime_ns == before


def test_rows_say_where_they_come_from_and_how_they_were_sampled(tmp_path):
    data = batch()
    rows = len(data)
    data.non_tensor_batch["seed"] = np.array([2**63 - 1 - row for row in range(rows)], dtype=object)
    data.non_tensor_batch["index"] = np.array([row // N for row in range(rows)], dtype=object)
    data.non_tensor_batch["extra_info"] = np.array([{"split": "train", 3: "\ud800"}] * rows, dtype=object)
    written = pq.read_table(write_samples(tmp_path, 1, data, sampling={"temperature": 0.5})).to_pylist()
    assert [row["seed"] for row in written[:2]] == [2**63 - 1, 2**63 - 2] and written[-1]["data_row"] == GROUPS - 1
    assert json.loads(written[0]["sampling"]) == {"temperature": 0.5}
    assert json.loads(written[0]["extra_info"]) == {"split": "train", "3": "\ud800"}


def test_one_number_of_each_response_stands_for_its_tokens(tmp_path):
    data = batch()
    written = pq.read_table(write_samples(tmp_path, 1, data)).to_pylist()
    for i, row in enumerate(written):
        length = int(data.batch["response_mask"][i].sum())
        gap = (data.batch["old_log_probs"][i] - data.batch["rollout_log_probs"][i]).abs()[:length].max().item()
        assert row["length"] == length and row["mismatch"] == pytest.approx(gap)
        assert row["advantage"] == pytest.approx(data.batch["advantages"][i, :length].mean().item(), abs=1e-6)


def test_validations_lie_beside_and_are_thinned_with_the_steps(tmp_path):
    table = sample_table(
        3, {key: batch().batch[key] for key in ("responses", "response_mask")} | {"reward_score": [1] * 12}
    )
    path = write_validation(tmp_path, 3, [table, table])
    write_samples(tmp_path, 2, batch())
    assert path.name == "val_3.parquet" and pq.read_table(path)["score"].to_pylist() == [1.0] * 24
    assert [file.name for file in sample_files(tmp_path)] == ["step_2.parquet"]
    assert validation_files(tmp_path) == [path]
    thin_samples(tmp_path, path.stat().st_size)
    assert sample_files(tmp_path) == [] and validation_files(tmp_path) == [path]
    thin_samples(tmp_path, 0)
    assert validation_files(tmp_path) == []
