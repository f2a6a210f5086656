"""Experience: several batches under way, any number of rows per prompt, each response scored as its own row."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.config.root import PPOConfig
from posttrain.controller.group import register, to_all
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.protocol import DataProto
from posttrain.rewards.types import RewardResult
from posttrain.rollout.base import Output
from posttrain.rollout.sampling import combine_seeds
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.reward import RewardManager, keys_of
from posttrain.workers.groups import RolloutGroup


class Echo:
    """A rollout whose response is (the prompt's first id, the sample), and which answers the newest request first."""

    config = None

    def __init__(self):
        self.waiting, self.seeds, self.asked = [], {}, []

    @register(to_all)
    def submit(self, prompts):
        fields = prompts.non_tensor_batch
        self.asked.append(dict(prompts.meta_info))
        for uid, sample, ids, seed in zip(
            *(fields[n] for n in ("uid", "sample", "raw_prompt_ids", "seed")), strict=True
        ):
            self.seeds[uid, sample] = seed
            self.waiting.append(Output((uid, sample), [ids[0], 1 + sample], [0.0, 0.0], "stop", [(0, 2)]))

    @register(to_all)
    def advance(self, others_may_join=False, streams=()):
        ended = [self.waiting.pop()] if self.waiting else []
        return ended, bool(self.waiting), []


class Letters:
    """A pool that scores a response by the sum of its ids, late: a result is there when the next one is asked for."""

    def __init__(self):
        self.open, self.groups = [], {}

    def submit_many(self, items):
        for key, item in items:
            self.open.append((key, RewardResult(float(sum(map(int, item.solution_str.split()))))))
            self.groups[key] = (item.group, item.group_size, item.ground_truth)

    def poll(self):
        return []

    def wait_some(self):
        return [self.open.pop(0)] if self.open else []


class Words:
    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows]


def prompts(*first_ids: int) -> DataProto:
    columns = {
        "raw_prompt_ids": [[number, 7] for number in first_ids],
        "data_source": ["s"] * len(first_ids),
        "ground_truth": [str(number) for number in first_ids],
        "extra_info": [{}] * len(first_ids),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto.from_dict(non_tensors=arrays)


@pytest.fixture
def experience():
    worker, pool = Echo(), Letters()
    manager = RewardManager(pool, Words())  # pyright: ignore
    made = Experience(PPOConfig(), Words(), RolloutGroup(LocalWorkerGroup(worker)), manager)
    made.worker, made.pool = worker, pool  # pyright: ignore
    return made


def test_batches_under_way_together_get_their_own_rows_and_scores(experience):
    one = experience.ask(experience.number(prompts(10, 20)), 2)
    two = experience.ask(experience.number(prompts(30, 40, 50)), [1, 3, 2])
    second = experience.wait_for_scores(experience.wait_for_responses(two))
    first = experience.wait_for_scores(experience.wait_for_responses(one))
    assert first.batch["responses"].tolist() == [[10, 1], [10, 2], [20, 1], [20, 2]]
    assert second.batch["responses"].tolist() == [[30, 1], [40, 1], [40, 2], [40, 3], [50, 1], [50, 2]]
    assert list(first.non_tensor_batch["reward_score"]) == [11, 12, 21, 22]
    assert list(second.non_tensor_batch["reward_score"]) == [31, 41, 42, 43, 51, 52]
    assert list(second.non_tensor_batch["uid"]) == ["2", "3", "3", "3", "4", "4"]
    assert experience.pool.groups["3", 1] == ("3", 3, "40") and experience.pool.groups["2", 0] == ("2", 1, "30")
    assert not (experience._outputs or experience._scores or experience._prompts)


def test_requests_that_come_while_a_worker_is_at_its_last_ones_are_not_forgotten(experience):
    experience.rollout.overlaps = True
    one = experience.ask(experience.number(prompts(10, 20)), 1)
    experience.poll()  # the worker is at the second one now, and will say that it has nothing left
    two = experience.ask(experience.number(prompts(30)), 1)
    assert experience.wait_for_responses(one).batch["responses"].tolist() == [[10, 1], [20, 1]]
    assert experience.wait_for_responses(two).batch["responses"].tolist() == [[30, 1]]


def test_groups_go_to_the_reward_models_own_workers_while_others_are_generated_and_only_in_training(experience):
    told: list[tuple[str, list]] = []
    groups = SimpleNamespace(
        expect=lambda rows: told.append(("expect", keys_of(rows))),
        feed=lambda ended, prompts: told.append(("feed", [(output.id, prompts[output.id]) for output in ended])),
        forget=lambda uids: told.append(("forget", list(uids))),
    )
    experience.model_reward = SimpleNamespace(groups=groups)
    rows = experience.ask(experience.number(prompts(10, 20)), 1)
    assert told.pop() == ("expect", [("0", 0), ("1", 0)])
    experience.poll()
    assert told.pop() == ("feed", [(("1", 0), [20, 7])]) and experience._outputs.keys() == {("1", 0)}
    experience.wait_for_responses(rows)
    assert told.pop() == ("feed", [(("0", 0), [10, 7])])
    experience.ask(experience.number(prompts(30)), 1, validate=True)
    assert told == []
    experience.forget(["3"])
    assert told == [("forget", ["3"])]


class After:
    """A call to other workers that is done when it was asked for so many times."""

    def __init__(self, times):
        self.times = times

    def done(self):
        self.times -= 1
        return self.times < 0


def test_what_is_under_way_moves_on_while_other_workers_are_waited_for_and_no_longer(experience):
    rows = experience.ask(experience.number(prompts(10, 20, 30)), 1)
    experience.poll_until(After(2))
    assert len(experience._outputs) == 2 and len(experience.pool.open) == 2  # these are with the rewards
    endless = After(1000)
    experience.poll_until(endless)
    assert len(experience._outputs) == 3 and endless.times == 999  # nothing is left to do
    assert experience.wait_for_responses(rows).batch["responses"].tolist() == [[10, 1], [20, 1], [30, 1]]


def test_a_samples_seed_follows_from_its_prompts_serial_number_and_its_own_whatever_it_is_asked_with(experience):
    seed = experience.config.trainer.seed
    experience.ask(experience.number(prompts(1, 2, 3)), 2)
    experience.ask(experience.number(prompts(4)), 3)
    for (uid, sample), given in experience.worker.seeds.items():
        assert given == combine_seeds(seed, int(uid), sample)
    assert len(set(experience.worker.seeds.values())) == 9 and experience.serial == 4


def test_validation_draws_other_random_numbers_and_says_how_it_samples(experience):
    asked = prompts(1)
    asked.non_tensor_batch["serial"] = np.array([0], dtype=object)
    asked.non_tensor_batch["uid"] = np.array(["val-0"], dtype=object)
    experience.ask(asked, 1, stream=7, validate=True)
    assert experience.worker.seeds["val-0", 0] == combine_seeds(experience.config.trainer.seed, 7, 0, 0)
    assert experience.worker.asked == [{"validate": True}] and experience.serial == 0
