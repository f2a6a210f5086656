"""Policy, rollout and reference as workers of their own answer as the worker that holds the three together."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from textbook import ACTOR, CPU, ROLLOUT, actor, batch, ppo_config
from toy_workers import Toy

from posttrain.config import PPOConfig, load_config
from posttrain.controller.group import Calls
from posttrain.controller.pool import Finished, LocalWorkerGroup, LocalWorkers, RolePool
from posttrain.errors import UserError
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.rollout import weight_buckets
from posttrain.rollout.weight_buckets import SyncError, split_into_buckets, without_tied_copies
from posttrain.trainer.ppo.parts import TrainingGroups, WorkerClasses
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.run.process import open_workers
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, PolicyWorker, ReferenceWorker, RolloutWorker
from posttrain.workers.groups import ColocatedGroup, DisaggregatedGroup, PolicyGroup, RolloutGroup
from posttrain.workers.update_plan import in_row_order

SETTINGS = {f"{ACTOR}.optim.lr": 1e-2}


def test_rollout_calls_reach_the_workers_that_generate_and_the_others_all():
    class Ranks(LocalWorkerGroup):
        world_size, asked = 4, ()

        def _send(self, rank, name, arguments):
            self.asked += (rank,)
            return Finished(lambda: None)

    def asked(settings: list[str], call: str) -> tuple[int, ...]:
        worker = object.__new__(ActorRolloutRefWorker)
        worker.config = load_config(["trainer.n_workers=4", *settings]).config
        group = ColocatedGroup(Ranks(worker))
        getattr(group, call).later()
        return group.group.asked

    some = [f"{ROLLOUT}.colocated_workers=2"]
    assert asked(some, "advance") == (0, 1) and asked([], "advance") == (0, 1, 2, 3)
    assert asked(some, "lost_weights") == (0, 1, 2, 3)
    assert asked([*some, f"{ROLLOUT}.tensor_model_parallel_size=2"], "advance") == (0, 1)


@pytest.fixture(scope="module")
def together(tiny_model):
    return actor(tiny_model, SETTINGS, total_updates=8, reference=True)


@pytest.fixture(scope="module")
def apart(tiny_model):
    """The three by role, in one process."""
    config = ppo_config(tiny_model, SETTINGS)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers = LocalWorkers()
    groups = {
        "policy": workers.create("policy", PolicyWorker, config, tokenizer, CPU, total_updates=8),
        "rollout": workers.create("rollout", RolloutWorker, config, tokenizer, CPU),
        "reference": workers.create("reference", ReferenceWorker, config, CPU),
    }
    for group in groups.values():
        group.init_model()
    return groups


def responses(group) -> list[list[int]]:
    ids, seeds = np.empty(4, dtype=object), np.arange(4).astype(object)
    ids[:] = [[256, 40 + row, 61] for row in range(4)]
    made = group.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": seeds})).batch
    return [row[mask.bool()].tolist() for row, mask in zip(made["responses"], made["response_mask"], strict=True)]


def test_policy_rollout_and_reference_apart_give_what_they_give_together(together, apart):
    data = batch()
    assert responses(apart["rollout"]) == responses(together)
    before = apart["policy"].compute_log_prob(data).batch["old_log_probs"]
    assert apart["policy"].update_actor(data) == together.update_actor(data)
    after = apart["policy"].compute_log_prob(data).batch["old_log_probs"]
    assert torch.equal(after, together.compute_log_prob(data).batch["old_log_probs"]) and not torch.equal(before, after)
    frozen = apart["reference"].compute_ref_log_prob(data).batch["ref_log_prob"]
    assert torch.equal(frozen, together.compute_ref_log_prob(data).batch["ref_log_prob"]) and torch.equal(
        frozen, before
    )


def test_a_role_alone_answers_for_itself_only(apart):
    for role, name in (("policy", "submit"), ("reference", "update_actor"), ("rollout", "compute_log_prob")):
        with pytest.raises(AttributeError, match=name):
            getattr(apart[role], name)


def test_a_call_that_fails_leaves_the_rollout_asleep_and_without_requests(apart):
    worker, ids = apart["rollout"].worker, np.empty(2, dtype=object)
    ids[:] = [[256, 40], []]
    with pytest.raises(ValueError, match="needs a prompt"):
        prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": np.arange(2).astype(object)})
        apart["rollout"].generate_sequences(prompts)
    assert not worker.awake and not worker.engine.has_work() and worker.engine.asleep


def test_a_rank_that_got_no_rows_generates_nothing(apart):
    """Fewer prompts than ranks: the others' rows are all there is."""
    ids = np.empty(1, dtype=object)
    ids[:] = [[256, 40]]
    prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, "seed": np.zeros(1, object)})
    worker = apart["rollout"].worker
    assert len(worker.generate_sequences(prompts[[]])) == 0 and not worker.awake
    calls = Calls([(prompts,), (prompts[[]],)], [[0], []])
    made = in_row_order([worker.generate_sequences(*arguments) for arguments in calls.arguments], calls)
    assert len(made) == 1 and made.batch["responses"].shape[0] == 1


# -- other workers generate than train --------------------------------------------------------------------------------


def test_what_is_learnt_reaches_those_who_generate_and_is_proved_by_checksum_and_probe(together, apart):
    pair = DisaggregatedGroup(PolicyGroup(apart["policy"]), RolloutGroup(apart["rollout"]))
    before = pair.sync_weights(1)
    together.sync_weights(1)
    data = batch()
    assert pair.update_actor(data) == together.update_actor(data)  # pyright: ignore
    after = pair.sync_weights(2)
    together.sync_weights(2)
    assert before["sync/checksum"] != after["sync/checksum"] and after["sync/probe_max"] < 1e-6
    assert responses(pair) == responses(together) and pair.rollout.worker.engine.version == 2
    assert pair.rollout_engine() == apart["rollout"].rollout_engine() and pair.notes() == together.notes()


def test_weights_that_changed_on_the_way_are_named_and_an_engine_that_ignores_them_is_found_out(apart, monkeypatch):
    pair = DisaggregatedGroup(PolicyGroup(apart["policy"]), RolloutGroup(apart["rollout"]))
    plain, load = LocalWorkerGroup._send_answer, apart["rollout"].worker.engine.load_weights

    def changed(self, rank, name, answer, arguments):
        answer.result().tensors["model.norm.weight"].add_(1e-6)
        return plain(self, rank, name, answer, arguments)

    monkeypatch.setattr(LocalWorkerGroup, "_send_answer", changed)
    with pytest.raises(SyncError, match=r"weight model\.norm\.weight reached a rollout worker with another checksum"):
        pair.sync_weights(3)
    monkeypatch.setattr(LocalWorkerGroup, "_send_answer", plain)
    halved = lambda weights, version: load(((name, tensor / 2) for name, tensor in weights), version)  # noqa: E731
    monkeypatch.setattr(apart["rollout"].worker.engine, "load_weights", halved)
    with pytest.raises(SyncError, match=r"the rollout engine's log-probs differ from the trainer's"):
        pair.sync_weights(3)
    monkeypatch.undo()
    pair.sync_weights(3)


def test_an_engine_that_falls_asleep_during_a_sync_gets_all_weights_and_is_probed(apart, monkeypatch):
    """As one does whose last response ends between two calls of a sync that does not wait for responses."""
    pair = DisaggregatedGroup(PolicyGroup(apart["policy"]), RolloutGroup(apart["rollout"]))
    engine, loaded = apart["rollout"].worker.engine, []
    load = engine.load_weights

    def then_sleep(weights, version):
        load(weights, version)
        loaded.append(version)
        engine.sleep()

    monkeypatch.setattr(engine, "load_weights", then_sleep)
    rollout = apart["policy"].worker.config.actor_rollout_ref.rollout
    monkeypatch.setattr(rollout, "update_weights_bucket_megabytes", 1 / 64)
    assert pair.sync_weights(3)["sync/probe_max"] < 1e-6 and len(loaded) > 1


def test_workers_that_were_given_different_weights_stop_the_run(apart, monkeypatch):
    pair = DisaggregatedGroup(PolicyGroup(apart["policy"]), RolloutGroup(apart["rollout"]))
    monkeypatch.setattr(pair.carrier, "carry", lambda version: [7, 8])
    with pytest.raises(SyncError, match=r"different weights: checksums 7, 8"):
        pair.sync_weights(4)


def test_a_bucket_is_no_larger_than_it_may_be_and_all_weights_are_in_one(monkeypatch):
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 100)
    weights = {f"w{size}-{n}": torch.full((size,), float(n)) for n, size in enumerate((5, 12, 12, 40, 1, 25, 3))}
    made = list(split_into_buckets(weights.items()))
    assert [[len(tensor) for tensor in bucket.tensors.values()] for bucket in made] == [
        [5, 12],
        [12],
        [40],
        [1],
        [25],
        [3],
    ]
    joined = dict(itertools.chain.from_iterable(bucket.tensors.items() for bucket in made))
    assert joined.keys() == weights.keys() and all(torch.equal(joined[name], weights[name]) for name in weights)
    assert [bucket.first for bucket in made] == [True] + [False] * 5
    assert [bucket.last for bucket in made] == [False] * 5 + [True]
    empty = list(split_into_buckets(weights.items(), keep=False))  # another rank, which only helps to gather
    assert len(empty) == len(made) and not any(bucket.tensors for bucket in empty) and empty[-1].last


def test_tied_weights_travel_once():
    whole = torch.arange(8.0)
    weights = {
        "embed": whole,
        "q": whole[:4],
        "k": whole[4:],
        "none": whole[:0],
        "head": whole.detach(),
        "nil": whole[:0],
    }
    assert [name for name, _ in without_tied_copies(weights.items())] == ["embed", "q", "k", "none", "nil"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_sees_a_change_anywhere_and_parts_that_changed_places(dtype):
    count = 3 * 8 * weight_buckets.WORDS + 5  # some blocks and a rest, whatever the type's size
    tensor = torch.arange(count).remainder(100).to(dtype)
    sums = {weight_buckets.checksum(tensor)}
    for place in (0, 1, 7, count // 2, count - 6, count - 1):
        changed = tensor.clone()
        changed[place] += 1
        sums.add(weight_buckets.checksum(changed))
    block = 8 * weight_buckets.WORDS // tensor.element_size()
    sums.add(weight_buckets.checksum(torch.cat([tensor[block : 2 * block], tensor[:block], tensor[2 * block :]])))
    assert len(sums) == 8 and weight_buckets.checksum(tensor.clone()) in sums
    assert weight_buckets.checksum(torch.tensor(1.0)) != weight_buckets.checksum(torch.tensor(2.0))


def test_the_number_of_workers_that_generate_is_a_setting_and_alone_it_brings_ray(monkeypatch):
    ray_pool = pytest.importorskip("posttrain.controller.ray_pool")
    made = Mock(**{"return_value.cluster.was_there": False})
    monkeypatch.setattr(ray_pool, "RayWorkers", made)
    key = "actor_rollout_ref.rollout.n_workers"
    for given, ranks, pools in (([f"{key}=2"], 1, [RolePool("rollout", 2, key)]), (["trainer.n_workers=2"], 2, [])):
        open_workers(load_config(given).config, CPU, None)
        assert made.call_args.args[0] == ranks and made.call_args.kwargs["pools"] == pools


OWN = {
    "reward_model": ("reward_model.n_workers", False, ["reward_model.enable=True", "reward_model.model.path=m"]),
    "critic": ("critic.n_workers", True, ["algorithm.adv_estimator=gae"]),
    "reference": ("actor_rollout_ref.ref.n_workers", True, ["actor_rollout_ref.actor.use_kl_loss=True"]),
}


@pytest.mark.parametrize("role", list(OWN))
def test_workers_of_a_role_follow_from_its_setting(monkeypatch, role):
    ray_pool = pytest.importorskip("posttrain.controller.ray_pool")
    made = Mock(**{"return_value.cluster.was_there": False})
    monkeypatch.setattr(ray_pool, "RayWorkers", made)
    key, together, given = OWN[role]
    for count in (1, 2):
        open_workers(load_config([*given, f"{key}={count}"]).config, CPU, None)
        pool = RolePool(role, count, key, together=together and count > 1)
        assert made.call_args.args[0] == 1 and made.call_args.kwargs["pools"] == [pool]
    assert isinstance(open_workers(load_config(given).config, CPU, None), LocalWorkers)


def test_a_class_of_the_users_own_for_both_roles_is_told_to_be_two():
    class Own(ActorRolloutRefWorker):
        pass

    workers: Any = SimpleNamespace(own_size=lambda role: 2, words=lambda: "")

    class Mine(WorkerClasses):
        actor_class = Own

    counts = {"total_updates": 1, "reference": False, "critic_updates": None}
    groups = TrainingGroups(workers, Mine, PPOConfig(), None, CPU, **counts)
    with pytest.raises(UserError, match=r"n_workers=2 .*but Mine .*actor_class = Own.*policy_class and rollout_class"):
        groups.load_models()


def test_one_step_off_older_responses_are_weighed_unless_somebody_says_what_is_done_about_them():
    key, apart = "algorithm.rollout_correction.rollout_is", "actor_rollout_ref.rollout.n_workers=1"
    assert load_config([apart]).value(key) is None
    off = [apart, "trainer.one_step_off=True"]
    assert load_config(off).value(key) == "token" and any(key in note for note in load_config(off).notes)
    assert load_config([*off, f"{key}=null"]).value(key) is None
    assert load_config([*off, f"{key}=sequence"]).value(key) == "sequence"
    assert load_config([*off, f"{ACTOR}.old_log_probs=rollout"]).value(key) is None
    with pytest.raises(UserError, match=r"n_workers=1 or more, which only generate"):
        load_config(["trainer.one_step_off=True"])
    assert load_config([apart, "trainer.max_staleness=4"]).value(key) == "token"
    assert load_config(off).value("trainer.max_staleness") == 1
    assert load_config([*off, "trainer.max_staleness=1"]).value("trainer.max_staleness") == 1
    with pytest.raises(UserError, match=r"one_step_off=True` is a staleness of 1, but `trainer.max_staleness=2`"):
        load_config([*off, "trainer.max_staleness=2"])
    with pytest.raises(UserError, match=r"(?s)max_staleness=2` generates while it trains.*or trainer.max_staleness=0"):
        load_config(["trainer.max_staleness=2"])


def test_a_group_does_something_else_while_its_caller_waits():
    group, seen = LocalWorkerGroup(Toy(None)), []
    assert group.process() == [os.getpid()] and seen == []
    group.meanwhile = lambda call: seen.append(call.result())
    assert group.process() == [os.getpid()] == seen[0]
    group.process.later()
    assert len(seen) == 1  # nobody waits


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_responses_are_asked_for_up_to_the_bound_and_not_behind_the_last_step(bound):
    def asked(step: int, pending: int = 0, surplus: int = 0) -> list[int]:
        run, sizes = Mock(**{"config.trainer.max_staleness": bound, "sizes.total_steps": 9, "sizes.prompts": 4}), []
        run.pending.extra, run.pending.groups, run.step, run.group_filter.groups = 0, pending, step, surplus

        def ask(prompts: int) -> None:
            sizes.append(prompts)
            run.pending.groups += prompts

        run._can_ask_ahead, run._ask_ahead = lambda: RayPPOTrainer._can_ask_ahead(run), ask
        RayPPOTrainer._start_next_rollout(run)
        return sizes

    assert asked(0) == [4] * bound and asked(0, pending=4 * bound) == []  # those that wait stay
    assert asked(7) == [4] * min(bound, 1) and asked(8) == []
    assert asked(0, surplus=9) == [4] * (bound - 2)  # of dynamic sampling: two batches, which are trained before
    assert asked(0, pending=1) == [3, *[4] * (bound - 1)][:bound]  # what is left of a batch is filled up
