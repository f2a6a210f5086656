"""Workers in several processes give what one gives: on the same rows, the same losses, norms and weights. One Ray."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from textbook import ACTOR, CPU, MODEL, ROLLOUT, batch, ppo_config

from posttrain.controller.dispatch import register, to_all
from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.controller.wire import pack
from posttrain.engine.ranks import join_ranks, leave_ranks
from posttrain.errors import UserError
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from posttrain.workers.spread import by_groups, in_row_order

ray = pytest.importorskip("ray")
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


class Join:
    """A process becomes one of `count` ranks, whatever it was before."""

    def __init__(self, rank: int, count: int, address: str) -> None:
        leave_ranks()
        join_ranks(rank, count, address, CPU, timeout_s=300)


@pytest.fixture(scope="module")
def cluster():
    from posttrain.controller.ray_cluster import RayCluster

    made = RayCluster(4)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ranks(cluster):
    """`ranks(n)`: workers on n of four processes, or on this one."""
    from posttrain.controller.ray_group import RayWorkers, _fetched

    four = RayWorkers(4, CPU, cluster)

    def workers(count: int) -> Workers:
        if count == 1:
            return LocalWorkers()
        some = copy.copy(four)
        some.hosts, some.world_size = four.hosts[:count], count
        address = ray.get(four.hosts[0].free_address.remote())
        joining = [
            host.build.remote("join", *pack((Join, (rank, count, address), {}))) for rank, host in enumerate(some.hosts)
        ]
        for joined in joining:
            _fetched(joined)
        return some

    yield workers
    four.close()


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


def layout(engine: Any) -> tuple[tuple[int, ...], int]:
    """(copies of the model x ranks that hold one, or the latter alone; ranks that share a row's tokens)."""
    ranks = engine.settings.ranks
    return (tuple(ranks.mesh.shape), ranks.sequence_size) if ranks else ((1,), 1)


class ActorAndReference(ActorRolloutRefWorker):
    """Tells how it lies over the ranks."""

    @register(to_all)
    def layouts(self) -> list[Any]:
        return [layout(engine) for engine in (self.engine, self.reference) if engine]


class Critic(CriticWorker):
    @register(to_all)
    def layouts(self) -> list[Any]:
        return [layout(self.engine)]


def group_of(workers: Workers, model, settings: dict[str, Any], *, value: bool, **named: Any) -> WorkerGroup:
    config = ppo_config(
        model, {f"{ACTOR}.optim.lr": 1e-3, "critic.optim.lr": 1e-3, f"{ROLLOUT}.name": "hf", **settings}
    )
    if value:
        group = workers.create("critic", Critic, config, CPU, total_updates=40, **named)
    else:
        tokenizer = load_tokenizer(config.actor_rollout_ref.model)
        group = workers.create("actor", ActorAndReference, config, tokenizer, CPU, total_updates=40, **named)
    group.init_model()
    return group


def updates(group: WorkerGroup, *, value: bool, steps: int = STEPS) -> tuple[list[dict], torch.Tensor]:
    """Metrics of `steps` batches, several optimizer steps each, and what the model then gives for the last of them."""
    data, metrics = batch(), []
    for step in range(1, steps + 1):
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


@pytest.fixture(scope="module")
def alone(ranks, tiny_model):
    """`alone(kind)`: ten steps on one process, made once."""
    made: dict[str, Any] = {}

    def steps(kind: str) -> tuple[list[dict], torch.Tensor]:
        if kind not in made:
            value = kind == "critic"
            made[kind] = updates(group_of(ranks(1), tiny_model, SETTINGS[kind], value=value), value=value)
        return made[kind]

    return steps


def check_equal(one: tuple[list[dict], torch.Tensor], many: tuple[list[dict], torch.Tensor]) -> None:
    for mine, theirs in zip(one[0], many[0], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-9)
    assert float((one[1] - many[1]).abs().max()) < 1e-9


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", SETTINGS)
def test_ten_steps_on_several_processes_are_those_of_one(ranks, alone, tiny_model, kind, count):
    group = group_of(ranks(count), tiny_model, SETTINGS[kind], value=kind == "critic")
    assert set(group.layouts()) == {((count,), 1)}
    check_equal(alone(kind), updates(group, value=kind == "critic"))
    metrics, _ = alone(kind)
    assert metrics[0] != pytest.approx(metrics[-1], rel=1e-3)  # it has learnt something


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("count, copies, together", [(4, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_settings_say_how_weights_and_rows_are_cut_and_no_number_changes(
    ranks, alone, tiny_model, role, count, copies, together
):
    section, value = {"actor": ACTOR, "critic": "critic"}[role], role == "critic"
    kind = "critic" if value else "grpo"
    sizes = {
        f"{section}.fsdp_config.fsdp_size": count // copies,
        f"{section}.ulysses_sequence_parallel_size": together,
    }
    more = {} if value else {"reference": True}
    group = group_of(ranks(count), tiny_model, {**SETTINGS[kind], **sizes}, value=value, **more)
    shape = (copies, count // copies) if copies > 1 else (count,)
    assert group.layouts() == [(shape, together)] * (1 if value else 2)  # the reference lies as the actor does
    metrics, _ = updates(group, value=value, steps=2)
    for mine, theirs in zip(alone(kind)[0], metrics, strict=False):
        assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-9)


def test_heads_that_ranks_cannot_share_are_refused_in_words(ranks, tiny_model):
    with pytest.raises(UserError, match=r"ulysses_sequence_parallel_size=4: .*4 heads of queries and 2 of keys"):
        group_of(ranks(4), tiny_model, {f"{ACTOR}.ulysses_sequence_parallel_size": 4}, value=False)
