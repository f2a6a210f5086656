"""Layouts of workers: others generate than train, one step behind or more, several hold one engine, Megatron trains.
None changes a number."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from recorded_runs import (
    SIX,
    UNSTEADY,
    exported,
    furthest,
    weights_of,
)
from replay import Watched
from runs import metrics_of
from textbook import ACTOR, CPU, ROLLOUT, ppo_config
from toy_workers import OneEngine, Spoiled, Toy, TwoGenerate

from posttrain.config import load_config
from posttrain.controller.pool import Workers
from posttrain.conversations.conversation import TurnRequest
from posttrain.errors import UserError
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.rollout.weight_buckets import SyncError
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow


# -- other workers generate than train -------------------------------------------------------------------------------

APART = [(1, 1), (2, 1), (1, 2)]
FLOAT64 = {**SIX, "actor_rollout_ref.model.dtype": "float64", f"{ACTOR}.use_kl_loss": True, "trainer.test_freq": 3}
HALF = {**FLOAT64, "trainer.total_training_steps": 3}
LAST = {"trainer.export_hf": "last"}


@pytest.fixture(scope="module")
def colocated(runs):
    """Six steps of one process that trains and generates, validation among them."""
    return runs.free("colocated", 1, FLOAT64)


@pytest.fixture(scope="module")
def apart(runs):
    """By layout, the same six steps; each is made once."""
    made: dict[tuple[int, int], Any] = {}

    def run(layout: tuple[int, int]) -> Any:
        if layout not in made:
            made[layout] = runs.free(f"apart {layout}", layout, FLOAT64)
        return made[layout]

    return run


def check_same(one: Any, other: Any) -> None:
    """Metrics and weights of two runs are the same, but for rounding; so they sampled the same tokens."""
    check_same_metrics(one, other)
    assert furthest(weights_of(one.path), weights_of(other.path)) < 1e-9


def check_same_metrics(one: Any, other: Any) -> None:
    for mine, theirs in zip(metrics_of(one.path), metrics_of(other.path), strict=True):
        shared = {name: value for name, value in mine.items() if not name.startswith((*UNSTEADY, "sync/"))}
        assert {name: theirs[name] for name in shared} == pytest.approx(shared, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("layout", APART)
def test_other_workers_that_generate_change_no_number(apart, colocated, layout):
    ended = apart(layout)
    check_same(colocated, ended)
    assert {"perf/memory_gb/update_actor", "perf/rollout_memory_gb/gen"} <= ended.metrics[0].keys()


def test_those_that_train_hold_the_optimizer_the_others_none_and_weights_are_proved_in_every_step(
    runs, ranks, colocated
):
    workers = Watched(ranks((2, 2)))
    apart = runs.watched("apart (2, 2)", workers, FLOAT64)
    check_same(colocated, apart)
    sums = [line["sync/checksum"] for line in apart.metrics]
    assert len(set(sums)) == 6 and all("sync/probe_max" in line for line in apart.metrics)
    training, rollout = workers.groups["actor"].holds(), workers.groups["rollout"].holds()
    assert [held for _, held in training] == [{"optimizer", "module"}] * 2
    assert [held for _, held in rollout] == [{"engine"}] * 2


def test_the_run_says_which_processes_train_and_which_generate_and_none_does_both(ranks):
    workers = ranks((2, 2))
    training, rollout = (workers.create(role, Toy, None).process() for role in ("actor", "rollout"))
    assert not set(training) & set(rollout)
    assert [re.sub(r" of .*,", ",", said) for said in workers.places()] == [
        f"Training: processes {training[0]}, {training[1]}, a core each.",
        f"Rollout: processes {rollout[0]}, {rollout[1]}, a core each.",
    ]


def test_with_adapters_they_change_none_either(runs):
    lora = {**HALF, "actor_rollout_ref.model.lora_rank": 4}
    by_ray = {**lora, f"{ROLLOUT}.weight_sync": "ray"}
    check_same(runs.free("colocated lora", 1, lora), runs.free("apart lora", (2, 1), by_ray))


@pytest.mark.parametrize("estimator", ["gae", "remax"])
def test_a_critic_and_greedy_baselines_work_beside_them(runs, estimator):
    given = {**HALF, "algorithm.adv_estimator": estimator, "trainer.total_training_steps": 2}
    by_gloo = {**given, f"{ROLLOUT}.weight_sync": "gloo"}
    check_same(runs.free(f"colocated {estimator}", 1, given), runs.free(f"apart {estimator}", (1, 1), by_gloo))


def test_six_steps_apart_are_three_and_three_to_the_bit_and_each_layout_goes_on_from_the_other(runs, colocated, apart):
    layout = APART[-1]
    runs.free("half", layout, HALF)
    shutil.copytree(runs.folder / "half", runs.folder / "joined")
    runs.free("parted", 1, HALF)
    ended, straight = runs.free("half", layout, FLOAT64), apart(layout)
    assert metrics_of(ended.path) == metrics_of(straight.path)
    assert furthest(weights_of(ended.path), weights_of(straight.path)) == 0.0
    check_same(colocated, runs.free("joined", 1, FLOAT64))
    check_same(colocated, runs.free("parted", layout, FLOAT64))


# -- and generate while those train ------------------------------------------------------------------------------------

OFF = {**FLOAT64, "trainer.one_step_off": True}
IN_TURN = {**FLOAT64, "algorithm.rollout_correction.rollout_is": "token"}  # which is what it becomes above


class InTurn(RayPPOTrainer):
    """One process that generates the next step's responses and then trains: what is done at once elsewhere."""

    def __init__(self, config, **parts) -> None:
        config.trainer.max_staleness = 1
        super().__init__(config, **parts)

    def _start_next_rollout(self) -> None:
        super()._start_next_rollout()
        self.pending.finish()


class AtOnce(RayPPOTrainer):
    """Notes by step whether responses were under way, or there, when the update was done, and were moved on by all who
    had been waited for."""

    begun: ClassVar[list[bool]] = []

    def _update(self, batch, step):
        metrics = super()._update(batch, step)
        groups = [*self.groups.training()]
        moved = [group.meanwhile == self.experience.poll_until for group in groups]
        AtOnce.begun.append(bool(self.experience._advancing or self.experience._outputs) and all(moved))
        return metrics


def test_weights_of_mean_1_have_the_mean_of_all_ranks(runs):
    section = "algorithm.rollout_correction"
    given = {**FLOAT64, "trainer.total_training_steps": 2, f"{ACTOR}.old_log_probs": "rollout"}
    given |= {
        f"{ACTOR}.policy_loss.loss_mode": "gpg",
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{section}.rollout_is": "token",
    }
    given |= {f"{section}.rollout_is_threshold": "0.9_1.0", f"{section}.rollout_is_batch_normalize": True}
    alone, both = runs.free("mean 1", 1, given), runs.free("mean 1 of two", 2, given)
    check_same(alone, both)
    assert all(line["rollout_is/norm"] < 0.95 for line in alone.metrics)


@pytest.fixture(scope="module")
def one_off(runs):
    AtOnce.begun = []
    return runs.free("one step off", (2, 1), OFF, AtOnce)


def test_one_step_off_is_what_generating_and_training_in_turn_gives_and_is_done_at_once(runs, one_off, colocated):
    in_turn = runs.free("in turn", 1, IN_TURN, InTurn)
    check_same(in_turn, one_off)
    assert AtOnce.begun == [True] * 5 + [False]
    assert [line["rollout/age"] for line in one_off.metrics] == [0.0, *[1.0] * 5]
    first, second = ([line["reward_mean"] for line in run.metrics] for run in (colocated, one_off))
    assert first[0] == second[0] and first[1:] != second[1:]  # on policy and one step off are not the same


def test_one_step_off_the_ratio_begins_at_1_and_the_older_policy_is_weighed_unless_that_is_unset(runs, one_off):
    first, *later = one_off.metrics
    assert max(line["actor/ratio_deviation"] for line in one_off.metrics) < 1e-9
    assert first["mismatch/logp_max"] < 1e-6 < 1e-4 < min(line["mismatch/logp_max"] for line in later)
    assert first["rollout_is/max"] == pytest.approx(1, abs=1e-6)
    assert min(line["rollout_is/max"] for line in later) > 1 + 1e-4
    assert not any("timing_s/old_log_prob" in line for line in one_off.metrics)  # the update has the log-probs anyway
    alone = {**OFF, "trainer.total_training_steps": 2, "algorithm.rollout_correction.rollout_is": None}
    alone |= {f"{ACTOR}.ppo_mini_batch_size": 2}  # so that old log-probs are needed: the rollout's would be others
    unset = runs.free("unset", (1, 1), alone).metrics[1]
    assert "rollout_is/max" not in unset and unset["actor/ratio_deviation"] < 1e-9 < unset["mismatch/logp_max"]


def test_one_step_off_goes_on_from_a_checkpoint_to_the_bit_in_either_layout(runs, one_off):
    for name in ("again", "again in turn"):
        copied = shutil.copytree(one_off.path, runs.folder / name / "test" / "run")
        shutil.rmtree(copied / "checkpoints" / "global_step_6")
    ended = runs.free("again", (2, 1), OFF)
    assert metrics_of(ended.path) == metrics_of(one_off.path)
    assert furthest(weights_of(ended.path), weights_of(one_off.path)) == 0.0
    check_same(runs.free("again in turn", 1, IN_TURN, InTurn), one_off)


@pytest.mark.parametrize("estimator", ["gae", "remax"])
def test_a_critic_greedy_baselines_and_filtered_groups_work_one_step_off(runs, estimator):
    given = {**IN_TURN, "algorithm.adv_estimator": estimator, "trainer.total_training_steps": 4}
    given |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 2}
    off = {**given, "trainer.one_step_off": True}
    in_turn = runs.free(f"in turn {estimator}", 1, given, InTurn)
    AtOnce.begun = []
    check_same(in_turn, runs.free(f"one step off {estimator}", (1, 1), off, AtOnce))
    assert AtOnce.begun == [True] * 3 + [False]


def test_two_steps_off_weights_arrive_in_flight_and_the_log_repeats_it_to_the_bit(runs):
    """Two engines in processes of their own: every run has a timing of its own, except a replay of its log, which here
    begins at a checkpoint."""
    given = {**FLOAT64, "trainer.max_staleness": 2, "data.max_response_length": 60, f"{ROLLOUT}.max_num_seqs": 4}
    given |= {"trainer.total_training_steps": 5, "trainer.save_freq": 2}
    first = runs.free("two off", (1, 2), given)
    assert max(line["rollout/age_max"] for line in first.metrics) == 2
    assert any(line["rollout/partial"] > 0 for line in first.metrics)
    events = [json.loads(line) for line in (first.path / "events.jsonl").read_text().splitlines()]
    assert {engine for line in events for engine in line.get("placed", [])} == {0, 1}
    copied = shutil.copytree(first.path, runs.folder / "two off again" / "test" / "run")
    for step in (4, 5):
        shutil.rmtree(copied / "checkpoints" / f"global_step_{step}")
    log = {"trainer.replay_events": str(first.path / "events.jsonl")}
    again = runs.free("two off again", (1, 2), given | log)
    assert metrics_of(again.path) == metrics_of(first.path)
    assert furthest(weights_of(again.path), weights_of(first.path)) == 0.0
    assert (again.path / "events.jsonl").read_text() == (first.path / "events.jsonl").read_text()


# -- one rollout engine over several workers ---------------------------------------------------------------------------

SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
CUT = {**FLOAT64, SIZE: 2}


def prompts(**how: bool) -> DataProto:
    """Four requests for two prompts."""
    ids = np.empty(4, dtype=object)
    ids[:] = [[256, 40, 50], [256, 40, 50], [256, 41], [256, 41]]
    names = {"uid": list("aabb"), "sample": [0, 1, 0, 1], "seed": [1, 2, 3, 4]}
    fields = {name: np.array(values, dtype=object) for name, values in names.items()}
    return DataProto.from_dict(non_tensors={"raw_prompt_ids": ids, **fields}, meta_info=how)


def in_turns(group: Any) -> dict[Any, tuple[list[int], list[float]]]:
    """What conversations of two turns wrote, by request."""
    ended: dict[Any, Any] = {}
    engines = range(group.teams("advance").world_size)

    def wait() -> list[Any]:
        new = []
        for engine in engines:
            busy = True
            while busy:
                outputs, busy, *_ = group.advance.on(engine).result()
                new += [(engine, output) for output in outputs]
        ended.update({output.id: (output.token_ids, list(map(float, output.log_probs))) for _, output in new})
        return new

    asked = prompts().non_tensor_batch
    begun = dict(zip(zip(asked["uid"], asked["sample"], strict=True), asked["raw_prompt_ids"], strict=True))
    group.submit(prompts())
    for engine, output in wait():
        ids = [*begun[output.id], *output.token_ids, 44]
        group.continue_conversations.on(engine, [TurnRequest(output.id, 1, ids, 5, 77, {}, after=0)]).result()
    for engine, output in wait():
        group.end_conversations.on(engine, [output.id[:2]]).result()
    return ended


def rollouts(workers: Workers, model: Any, **settings: Any) -> Any:
    """A group that generates, with these settings (__ for the dots)."""
    given = {f"{ROLLOUT}.{key.replace('__', '.')}": value for key, value in settings.items()}
    config = ppo_config(model, {**given, f"{ROLLOUT}.multi_turn": {"enable": True}})
    group = workers.create("one engine", OneEngine, config, load_tokenizer(config.actor_rollout_ref.model), CPU)
    group.init_model()
    return group


def responses(group: Any, **how: bool) -> tuple[list[list[int]], torch.Tensor]:
    made = group.generate_sequences(prompts(**how)).batch
    tokens = [row[mask.bool()].tolist() for row, mask in zip(made["responses"], made["response_mask"], strict=True)]
    return tokens, made["rollout_log_probs"]


def test_workers_that_hold_one_engine_write_what_one_writes_with_half_the_weights_and_cache_each(ranks, tiny_model):
    one, two = rollouts(ranks(1), tiny_model), rollouts(ranks(2), tiny_model, tensor_model_parallel_size=2)
    four = rollouts(ranks(4), tiny_model, tensor_model_parallel_size=2)
    assert "cut over 2 workers" in two.rollout_engine() and two.engine_ranks() == 2 and one.engine_ranks() == 1
    for how in ({}, {"greedy": True}):
        (wanted, mine), (found, theirs), (again, halves) = (responses(group, **how) for group in (one, two, four))
        assert wanted == found == again
        assert float((mine - theirs).abs().max()) < 1e-9 and float((mine - halves).abs().max()) < 1e-9
    turns = in_turns(one)
    assert len(turns) == 8
    for group in (two, four):
        others = in_turns(group)
        assert {id: tokens for id, (tokens, _) in others.items()} == {id: tokens for id, (tokens, _) in turns.items()}
        assert all(others[id][1] == pytest.approx(own, abs=1e-9) for id, (_, own) in turns.items())
    (whole,), parts = one.held(), two.held()
    assert [part["whole"] for part in parts] == [0, 0] and {part["cache"] for part in parts} == {whole["cache"] // 2}
    assert all(part["weights"] < 0.52 * whole["weights"] for part in parts)  # norms, and a token more, are on both
    scores = [group.rollout_scores() for group in (one, two) if group.wake_weights.later().result() is None]
    assert float((scores[0][0] - scores[1][0]).abs().max()) < 1e-9 and torch.equal(*scores[1])


def test_workers_that_only_generate_know_each_other_where_they_hold_engines_together(cluster, monkeypatch):
    from posttrain.controller import ray_pool
    from posttrain.trainer.run.process import open_workers

    made = Mock(**{"return_value.cluster.was_there": False})
    monkeypatch.setattr(ray_pool, "RayWorkers", made)
    for size in (1, 2):
        open_workers(load_config([f"{ROLLOUT}.n_workers=2", f"{SIZE}={size}"]).config, CPU, None)
        (pool,) = made.call_args.kwargs["pools"]
        assert (pool.workers, pool.team, pool.together) == (2, size, size > 1)
    monkeypatch.undo()
    workers = ray_pool.RayWorkers(1, CPU, cluster, pools=[pool])
    try:
        assert [float(got) for got in workers.create("rollout", Toy, None).plus_rank(torch.zeros(()))] == [1.0, 2.0]
    finally:
        workers.close()


def test_filters_penalties_and_stop_strings_are_decided_alike_by_all_workers_of_an_engine(ranks, tiny_model):
    how = {"top_k": 20, "repetition_penalty": 1.3, "stop": ["a", "e", "1"]}
    (wanted, mine), (found, theirs) = (
        responses(rollouts(ranks(size), tiny_model, tensor_model_parallel_size=size, **how)) for size in (1, 2)
    )
    assert wanted == found and float((mine - theirs).abs().max()) < 1e-9


def test_workers_of_an_engine_that_did_not_make_the_same_say_which_they_are(ranks, tiny_model):
    group = rollouts(ranks(2), tiny_model, tensor_model_parallel_size=2)
    group.slip()
    with pytest.raises(UserError, match="ranks 0 and 1 hold one rollout engine, but what it has sampled is not"):
        group.generate_sequences(prompts())


def test_heads_that_workers_cannot_share_out_are_refused_with_the_models_numbers(ranks, tiny_model):
    words = rf"{SIZE}=3: .* this one has 4 of queries and 2 of keys; set one of 1, 2, 4"
    with pytest.raises(UserError, match=words):
        rollouts(ranks(3), tiny_model, tensor_model_parallel_size=3)


@pytest.mark.parametrize("layout", [2, 4, (1, 2)])
def test_engines_over_two_workers_change_no_number_of_a_run(runs, colocated, layout, capsys):
    ended = runs.free(f"cut {layout}", layout, CUT)
    check_same(colocated, ended)
    said = {
        2: "Engines: 1, each held by 2 workers: 0, 1.",
        4: "Engines: 2, each held by 2 workers: 0, 1; 2, 3.",
        (1, 2): "Engines: 1, each held by 2 rollout workers: 0, 1.",
    }
    assert said[layout] in capsys.readouterr().out
    assert max(line["sync/probe_max"] for line in ended.metrics) < 1e-9


def test_an_engine_on_some_of_the_workers_that_train_changes_no_number(runs, colocated, capsys):
    class Trainer(RayPPOTrainer):
        actor_class = TwoGenerate

    some = {SIZE: 2, f"{ROLLOUT}.colocated_workers": 2}
    ended = runs.free("cut 2 of 4", 4, {**CUT, **some}, Trainer)
    check_same(colocated, ended)
    assert max(line["sync/probe_max"] for line in ended.metrics) < 1e-9
    said = capsys.readouterr().out
    assert "Engines: 1, each held by 2 workers: 0, 1." in said
    training, rollout = (re.findall(rf"{pool}: processes ([\d, ]+) of", said) for pool in ("Training", "Rollout"))
    assert training[0].count(",") == 3 and training[0].startswith(f"{rollout[0]}, ") and rollout[0].count(",") == 1
    lora = {**HALF, "actor_rollout_ref.model.lora_rank": 4}
    check_same(runs.free("colocated lora", 1, lora), runs.free("2 of 3 lora", 3, {**lora, **some}))


@pytest.mark.parametrize("layout", [2, (1, 2)])
def test_a_run_with_such_an_engine_goes_on_from_a_checkpoint_to_the_bit(runs, layout, capsys):
    straight = runs.free(f"cut {layout}", layout, CUT)
    copied = shutil.copytree(straight.path, runs.folder / f"cut again {layout}" / "test" / "run")
    shutil.rmtree(copied / "checkpoints" / "global_step_6")
    capsys.readouterr()
    ended = runs.free(f"cut again {layout}", layout, CUT)
    assert "global_step_3: 3 of 6 steps are done" in capsys.readouterr().out
    assert metrics_of(ended.path) == metrics_of(straight.path)
    assert furthest(weights_of(ended.path), weights_of(straight.path)) == 0.0


async def talk(chat, row):
    """Tells the model what it said, backwards, twice."""
    while chat.turns < 3 and not chat.over:
        chat.tell((await chat.say(max_tokens=4))[::-1])
    return len(set(chat.ids)) / 10


def test_agents_work_with_such_an_engine(runs, monkeypatch):
    monkeypatch.setattr("posttrain.conversations.agents.AGENTS", {"talk": talk})
    given = {**HALF, f"{ROLLOUT}.agent": "talk", "data.max_response_length": 60, "trainer.total_training_steps": 2}
    one, two = runs.free("talk", 1, given), runs.free("talk cut", 2, {**given, SIZE: 2})
    check_same(one, two)
    assert [line["num_turns/mean"] for line in two.metrics] == [3.0, 3.0]


def test_one_step_off_works_with_such_an_engine(runs, one_off):
    off = {**OFF, "trainer.total_training_steps": 3}
    cut = runs.free("cut one step off", (1, 2), {**off, SIZE: 2})
    for mine, theirs in zip(one_off.metrics, cut.metrics, strict=False):
        assert theirs["reward_mean"] == pytest.approx(mine["reward_mean"], abs=1e-9)
        assert theirs["actor/grad_norm"] == pytest.approx(mine["actor/grad_norm"], abs=1e-9)


def test_a_worker_that_lost_a_weight_of_such_an_engine_stops_the_run(runs):
    class Losing(RayPPOTrainer):
        actor_class = Spoiled

    with pytest.raises(SyncError, match="the rollout engine's log-probs differ from the trainer's"):
        runs.free("spoiled", 2, {**CUT, "trainer.total_training_steps": 2}, Losing)


# -- another engine trains -------------------------------------------------------------------------------------------


def by_megatron(cut: str) -> dict[str, Any]:
    return {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron_config": {f"{cut}_parallel_size": 2}}


@pytest.mark.parametrize("cut, layout", [("tensor", 2), ("pipeline", (2, 1))])
def test_a_run_by_megatron_has_the_numbers_of_one_by_fsdp_and_says_what_trains(runs, cut, layout, capsys):
    given = {**HALF, "algorithm.adv_estimator": "gae", "trainer.total_training_steps": 2, "trainer.export_hf": "last"}
    alone = runs.free(f"fsdp beside {cut}", 1, given)
    ended = runs.free(f"megatron {cut}", layout, {**given, **by_megatron(cut)})
    check_same_metrics(alone, ended)
    assert furthest(exported(alone.path), exported(ended.path)) < 1e-9
    assert re.search(rf"Train engine: megatron-core \d\S+ \(.*{cut} 2", capsys.readouterr().out)


def test_six_steps_by_megatron_are_three_and_three_to_the_bit(runs):
    cut = by_megatron("tensor")
    straight = runs.free("megatron in one", 2, {**FLOAT64, **cut})
    runs.free("megatron in two", 2, {**HALF, **cut})
    ended = runs.free("megatron in two", 2, {**FLOAT64, **cut})
    assert metrics_of(ended.path) == metrics_of(straight.path) and len(metrics_of(ended.path)) == 6
    assert furthest(weights_of(ended.path), weights_of(straight.path)) == 0.0


@pytest.mark.parametrize("cut, before, after", [("tensor", 4, 2), ("pipeline", 4, 2), (None, 2, 1)])
def test_a_run_by_megatron_goes_on_on_half_of_its_ranks(runs, cut, before, after):
    """As after the loss of a machine (trainer.min_nnodes): the sizes stay, and copies of the model are fewer."""
    by = by_megatron(cut) if cut else {f"{ACTOR}.strategy": "megatron"}
    straight = runs.free("megatron on one", 1, {**FLOAT64, **LAST, f"{ACTOR}.strategy": "megatron"})
    runs.free(f"megatron halved {cut}", before, {**HALF, **by})
    ended = runs.free(f"megatron halved {cut}", after, {**FLOAT64, **LAST, **by})
    assert len(metrics_of(ended.path)) == 6
    check_same_metrics(straight, ended)
    assert furthest(exported(straight.path), exported(ended.path)) < 1e-9
