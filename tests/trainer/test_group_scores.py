"""A reward model with workers of its own scores a group when its last response has ended, wherever the batch comes
from. No Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_replacement import Crew

from posttrain.controller.group import register
from posttrain.controller.incidents import WorkerDied
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.trainer.ppo.group_scores import GroupScores
from posttrain.workers.groups import RewardModelGroup
from posttrain.workers.update_plan import by_groups, in_row_order


class Sums:
    """Scores a response with the sum of its tokens, plus the number of rows that it was given with."""

    config = None

    @register(by_groups, in_row_order)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        tokens = data.batch["responses"].double() * data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]
        scores = torch.zeros(tokens.shape)
        scores[:, -1] = tokens.sum(-1) + len(data) / 100
        errors = [None if said != "bad" else "no score" for said in data.non_tensor_batch["raw_prompt"]]
        return DataProto.from_dict({"rm_scores": scores}, {"rm_error": errors, "rm_truncated": [False] * len(data)})


def rows(*uids: str, n: int = 2) -> DataProto:
    fields: dict[str, Any] = {"uid": [uid for uid in uids for _ in range(n)]}
    fields["sample"] = [sample for _ in uids for sample in range(n)]
    fields["raw_prompt"] = list(fields["uid"])
    return DataProto.from_dict(non_tensors={name: np.array(own, dtype=object) for name, own in fields.items()})


def response(uid: str, sample: int) -> Output:
    return Output((uid, sample), [10 * int(uid[-1]) + sample, 1], [0.0, 0.0], "stop")


def whole(*uids: str, n: int = 2) -> DataProto:
    asked = rows(*uids, n=n)
    outputs = [response(uid, sample) for uid in uids for sample in range(n)]
    return asked.union(to_batch([[7, 7]] * len(asked), outputs, 0))


PROMPTS = {(f"u{uid}", sample): [7, 7] for uid in range(9) for sample in range(2)}


@pytest.fixture
def crew():
    group = Crew(Sums, 2)
    return group, GroupScores(RewardModelGroup(group), 0)


def calls_of(group: Crew) -> list[int]:
    return [rank for rank, name in group.calls if name == "compute_rm_score"]


def test_a_group_is_scored_when_its_last_response_has_ended(crew):
    group, scores = crew
    scores.expect(rows("u1", "u2"))
    scores.feed([response("u1", 0), response("u2", 1)], PROMPTS)
    assert calls_of(group) == []
    scores.feed([response("u2", 0), response("v9", 0)], PROMPTS)  # of a validation is that one
    assert len(calls_of(group)) == 1
    scores.feed([response("u1", 1)], PROMPTS)
    assert len(calls_of(group)) == 2
    found, errors, truncated = scores.of(whole("u1", "u2"))
    assert found.tolist() == pytest.approx([11.02, 12.02, 21.02, 22.02])
    assert errors == [None] * 4 and not truncated.any() and len(calls_of(group)) == 2


def test_a_batch_that_nobody_was_told_of_is_scored_group_by_group_too(crew):
    group, scores = crew
    scores.expect(rows("u1"))
    scores.feed([response("u1", 1), response("u1", 0)], PROMPTS)
    found, _, _ = scores.of(whole("u2", "u1"))
    assert found.tolist() == pytest.approx([21.02, 22.02, 11.02, 12.02]) and len(calls_of(group)) == 2
    assert scores.of(whole("u2", "u1"))[0].tolist() == found.tolist()  # a checkpoint's batch, of which nothing is known
    assert len(calls_of(group)) == 4


def test_a_batch_that_a_stage_of_the_users_has_changed_is_scored_as_it_is(crew):
    group, scores = crew
    scores.expect(rows("u1", "u2", "u3"))
    scores.feed([response(uid, sample) for uid in ("u1", "u2", "u3") for sample in range(2)], PROMPTS)
    batch = whole("u1", "u2", "u3")[[1, 3, 2, 4, 5]]  # one less of the first, the second in another order
    batch.batch["responses"][4, 1] = 5  # a token of the third is another one
    assert scores.of(batch)[0].tolist() == pytest.approx([12.02, 22.02, 21.02, 31.02, 36.02])
    assert len(calls_of(group)) == 4  # the changed group was scored anew
    scores.expect(rows("u4"))
    scores.feed([response("u4", 0), response("u4", 1)], PROMPTS)
    batch = whole("u4")
    batch.batch["attention_mask"][0, -1] = 0  # the last token was taken away
    assert scores.of(batch)[0].tolist() == pytest.approx([40.02, 42.02]) and len(calls_of(group)) == 6


def test_another_batch_is_spread_over_the_workers_at_once(crew):
    group, scores = crew
    found, _, _ = scores.at_once(whole("u1", "u2", "u3", "u4"))
    assert calls_of(group) == [0, 1]
    assert found.tolist() == pytest.approx([tens + one + 0.04 for tens in (10, 20, 30, 40) for one in (1, 2)])


def test_groups_that_will_not_be_trained_are_forgotten(crew):
    group, scores = crew
    scores.expect(rows("u1", "u2"))
    scores.feed([response("u1", 0), response("u1", 1)], PROMPTS)
    scores.forget(["u1", "u2"])
    scores.feed([response("u2", 0), response("u2", 1)], PROMPTS)
    assert len(calls_of(group)) == 1 and not scores._calls and not scores._expected


def test_errors_are_those_of_their_rows(crew):
    _, scores = crew
    batch = whole("u1", "u2")
    batch.non_tensor_batch["raw_prompt"] = np.array(["u1", "bad", "u2", "u2"], dtype=object)
    assert scores.of(batch)[1] == [None, "no score", None, None]


def test_the_worker_that_was_given_the_fewest_tokens_gets_the_next_group(crew):
    group, scores = crew
    scores.expect(rows("u1", "u2", "u3", "u4"))
    long = Output(("u1", 0), [1] * 20, [0.0] * 20, "stop")
    others = [response(uid, sample) for uid in ("u1", "u2", "u3", "u4") for sample in range(2)][1:]
    scores.feed([long, *others], PROMPTS)
    assert calls_of(group) == [0, 1, 1, 1]  # 26 tokens, and three times 8


@pytest.mark.parametrize("early", [True, False])
def test_a_lost_worker_is_replaced_and_asked_again_for_its_groups_alone(crew, early):
    group, scores = crew
    replaced: list[str] = []

    def replace(death: WorkerDied) -> int:
        replaced.append(death.worker)
        group.replace(number := int(death.worker.split()[-1]))
        group.fails = lambda rank, name: False
        return number

    group.fails = lambda rank, name: rank == 0
    if early:
        scores.expect(rows("u1", "u2"))
        scores.feed([response(uid, sample) for uid in ("u1", "u2") for sample in range(2)], PROMPTS)
    scores.replace = replace
    assert scores.of(whole("u1", "u2"))[0].tolist() == pytest.approx([11.02, 12.02, 21.02, 22.02])
    assert replaced == ["rollout 0"]
    group.fails = lambda rank, name: rank == 1
    assert len(scores.at_once(whole("u1", "u2"))[0]) == 4 and replaced[1] == "rollout 1"
    group.fails, scores.replace = (lambda rank, name: True), None
    with pytest.raises(WorkerDied):
        scores.of(whole("u1"))
