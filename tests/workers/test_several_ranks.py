"""Workers in several processes give what one gives: on the same rows, the same losses, norms and weights. One Ray."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from textbook import ACTOR, CPU, MODEL, ROLLOUT, batch, ppo_config

from posttrain.controller.dispatch import register, to_all
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.errors import UserError
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from posttrain.workers.spread import by_groups, in_row_order

pytest.importorskip("ray")
STEPS = 10


class Toy:
    """Answers with what it was given, changed in place."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @register(by_groups, in_row_order)
    def doubled(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"twice": data.batch["x"].mul_(2)})

    @register(to_all, lambda results, calls: results)
    def plus_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(torch.distributed.get_rank() + 1)

    @register(to_all)
    def refuse(self) -> None:
        raise UserError("this cannot be had")

    @register(to_all, lambda results, calls: results)
    def process(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster():
    from posttrain.controller.ray_cluster import RayCluster

    made = RayCluster(4)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ranks(cluster):
    """`ranks(n)`: workers on n processes, or on this one."""
    from posttrain.controller.ray_group import RayWorkers

    made: dict[int, Workers] = {1: LocalWorkers()}

    def workers(count: int) -> Workers:
        if count not in made:
            made[count] = RayWorkers(count, CPU, cluster)
        return made[count]

    yield workers
    for group in made.values():
        group.close()


def test_what_arrives_can_be_changed_without_changing_anybody_elses(ranks):
    group, sent = ranks(2).create("toy", Toy, None), torch.zeros(300_000)  # large enough for the shared store
    assert [float(got[0]) for got in group.plus_rank(sent)] == [1.0, 2.0]
    received = group.plus_rank(sent)
    received[0].add_(5)
    assert float(sent.sum()) == 0 and float(received[1][0]) == 2.0
    assert [float(got[0]) for got in group.plus_rank(torch.zeros(4, dtype=torch.bfloat16))] == [1.0, 2.0]


def test_rows_come_back_in_order_errors_as_themselves_and_roles_share_a_process(ranks):
    group = ranks(2).create("toy", Toy, None)
    data = DataProto.from_dict(
        {"x": torch.arange(6), "attention_mask": torch.ones(6, 2)}, {"uid": np.array(list("aabbcc"), dtype=object)}
    )
    assert group.doubled(data).batch["twice"].tolist() == [0, 2, 4, 6, 8, 10] and data.batch["x"].tolist()[5] == 5
    with pytest.raises(UserError, match="this cannot be had"):
        group.refuse()
    other, first = ranks(2).create("other", Toy, None).process(), group.process()
    assert other == first and len(set(first)) == 2 and os.getpid() not in first
    assert group.later.process().result() == first and group.on(1).process().result() == first[1]


def updates(workers: Workers, model, settings: dict[str, Any], *, value: bool) -> tuple[list[dict], torch.Tensor]:
    """Metrics of ten batches, several optimizer steps each, and what the model then gives for the last of them."""
    config = ppo_config(
        model, {f"{ACTOR}.optim.lr": 1e-3, "critic.optim.lr": 1e-3, f"{ROLLOUT}.name": "hf", **settings}
    )
    if value:
        group = workers.create("critic", CriticWorker, config, CPU, total_updates=40)
    else:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        group = workers.create("actor", ActorRolloutRefWorker, config, tokenizer, CPU, total_updates=40)
    group.init_model()
    data, metrics = batch(), []
    for step in range(1, STEPS + 1):
        data.meta_info["step"] = step
        metrics.append(group.update_critic(data) if value else group.update_actor(data))
    if value:
        return metrics, group.compute_values(data).batch["values"]
    return metrics, group.compute_log_prob(data).batch["old_log_probs"]


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.shuffle": True},
    "lora": {f"{MODEL}.lora_rank": 4},
    "critic": {},
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", SETTINGS)
def test_ten_steps_on_several_processes_are_those_of_one(ranks, tiny_model, kind, count):
    alone, given = updates(ranks(1), tiny_model, SETTINGS[kind], value=kind == "critic")
    together, same = updates(ranks(count), tiny_model, SETTINGS[kind], value=kind == "critic")
    for one, many in zip(alone, together, strict=True):
        assert many == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert float((same - given).abs().max()) < 1e-9
    assert alone[0] != pytest.approx(alone[-1], rel=1e-3)  # it has learnt something
