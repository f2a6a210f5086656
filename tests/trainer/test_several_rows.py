"""Conversations that end in several rows: one sample, one advantage, every sampled token trained once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from runs import metrics_of, run

from posttrain.conversations.agents import AGENTS, register_agent

R = "actor_rollout_ref__rollout__"
COMMON = {"data__max_prompt_length": 64, "data__max_response_length": 64, f"{R}agent": "tree", f"{R}n": 4}


def reward_of(row) -> float:
    """Differs within a group, and does not depend on what was sampled."""
    return float(row["sample"] % 3)


@pytest.fixture(autouse=True)
def registered():
    @register_agent("tree")
    async def tree(chat, row):
        """Sample 0 has one row; 1 is compacted twice; 2 asks a sub-agent; 3 tries two continuations."""
        sample = row["sample"]
        await chat.say(max_tokens=4)
        if sample == 1:
            for number in range(2):
                chat.compact([{"role": "user", "content": f"so far: {number}"}])
                await chat.say(max_tokens=3)
        if sample == 2:
            helper = chat.branch([{"role": "user", "content": "help"}])
            await helper.say(max_tokens=2)
            helper.tell("more")
            words = await helper.say(max_tokens=2)
            chat.tell(f"it says {len(words)}")
            await chat.say(max_tokens=3)
        if sample == 3:
            chat.tell("go on")
            other = chat.branch()
            await chat.say(max_tokens=2)
            await other.say(max_tokens=3)
        return reward_of(row)

    yield
    AGENTS.clear()


def rows_of(path: Path, name: str = "step_1") -> list[dict]:
    return pq.read_table(path / "samples" / f"{name}.parquet").to_pylist()


def by_sample(rows: list[dict]) -> dict[tuple, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["uid"], row["sample"]].append(row)
    return found


def test_each_branch_is_a_row_of_its_sample_with_one_advantage(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, **COMMON)
    samples = by_sample(rows_of(result.path))
    assert len(samples) == 4 * 4
    shapes = {
        0: [(0, None, 0)],
        1: [(0, None, 0), (1, 0, None), (2, 1, None)],
        2: [(1, 0, None), (0, None, 0)],
        3: [(0, None, 0), (1, 0, None)],
    }
    for (_, sample), rows in samples.items():
        found = [(row["branch"], row["parent"]) for row in rows]
        assert found == [shape[:2] for shape in shapes[sample]], "in the order of their last turns"
        assert {row["score"] for row in rows} == {float(sample % 3)}
        advantages = {a for row in rows for a, own in zip(row["advantages"], row["response_mask"], strict=True) if own}
        assert len(advantages) == 1
    # The same numbers as a group of four responses: mean and deviation count a sample once.
    scores = np.array([reward_of({"sample": sample}) for sample in range(4)])
    wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    for (_, sample), rows in samples.items():
        assert rows[0]["advantage"] == pytest.approx(wanted[sample], abs=1e-6)
    (first, *_) = metrics_of(result.path)
    assert first["reward_mean"] == scores.mean() and first["groups/count"] == 4
    assert (first["num_rows/mean"], first["num_rows/max"]) == (2.0, 3.0)


def test_a_shared_beginning_is_trained_in_one_row_only(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, **COMMON)
    for (_, sample), rows in by_sample(rows_of(result.path)).items():
        turns = rows[0]["num_turns"]
        assert turns == {0: 1, 1: 3, 2: 4, 3: 3}[sample]
        ids = {row["branch"]: [*row["prompt_ids"], *row["response_ids"]] for row in rows}
        for row in rows:
            if row["parent"] is not None:
                fork = row["fork"]
                assert ids[row["branch"]][:fork] == ids[row["parent"]][:fork]
                assert not any(row["response_mask"][: max(0, fork - len(row["prompt_ids"]))])
        if sample == 3:  # both continue behind the first turn and what was told
            main, other = sorted(rows, key=lambda row: row["branch"])
            assert other["fork"] >= len(main["prompt_ids"]) + 4
            assert sum(main["response_mask"]) == 4 + 2 and sum(other["response_mask"]) == 3
        trained = sum(sum(row["response_mask"]) for row in rows)
        written = sum(count for row in rows for _, count in __import__("json").loads(row["policy_versions"]))
        assert trained == written == {0: 4, 1: 10, 2: 11, 3: 9}[sample]
