"""Document 0's asynchronous worker against one that generates all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seen import parity_reward, settings

from posttrain.config import load_config
from posttrain.controller.group import register, to_all
from posttrain.rollout.generate import generate
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.ppo.runner import opened_training
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker
from posttrain.workers.update_plan import by_groups


class Synchronous(ActorRolloutRefWorker):
    """`submit` goes back when all its responses are made, and nothing is ever under way."""

    calls = 0

    @register(by_groups)
    def submit(self, prompts):
        fields = prompts.non_tensor_batch
        ids, seeds = [list(row) for row in fields["raw_prompt_ids"]], [int(seed) for seed in fields["seed"]]
        self.rollout.wake()
        made = generate(self.rollout.engine, ids, [self.rollout._sampling_of(prompts)] * len(ids), seeds)
        self.rollout.sleep()
        names = zip(fields["uid"].tolist(), fields["sample"].tolist(), strict=True)
        self.ended = [replace(output, id=name) for output, name in zip(made, names, strict=True)]
        Synchronous.calls += 1

    @register(to_all)
    def advance(self):
        ended, self.ended = self.ended, []
        return ended, False


@pytest.fixture
def rows(tiny_model, parquet, tmp_path):
    """What a run of three steps with this worker samples."""

    def of(worker: type[ActorRolloutRefWorker]) -> list:
        class Trainer(RayPPOTrainer):
            actor_class = worker
            seen: list = []  # noqa: RUF012

            def _update(self, batch, step):
                written = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :].bool()
                responses = [row[mask].tolist() for row, mask in zip(batch.batch["responses"], written, strict=True)]
                self.seen.append(sorted(zip(batch.non_tensor_batch["uid"].tolist(), responses, strict=True)))
                return super()._update(batch, step)

        chosen = settings(tiny_model, parquet, tmp_path, trainer__total_training_steps=3)
        chosen["trainer.experiment_name"] = worker.__name__
        with opened_training(load_config(chosen), reward=parity_reward, trainer_class=Trainer) as trainer:
            assert trainer.fit().status == "finished"
        return Trainer.seen

    return of


def test_the_asynchronous_worker_samples_what_a_synchronous_one_does(rows):
    under_way = rows(AsyncActorRolloutRefWorker)
    at_once = rows(Synchronous)
    assert Synchronous.calls == 3 and under_way == at_once
    assert [len(step) for step in under_way] == [12, 12, 12] and under_way[0] != under_way[1]
