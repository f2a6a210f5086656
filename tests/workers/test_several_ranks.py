"""Workers in several processes give what one gives: on the same rows, the same losses, norms and weights. One Ray."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import light_rewards
import numpy as np
import pytest
import torch
from left_behind import KILLED, REPLACED, check_nothing_is_left
from patience import until
from recorded_runs import (
    GOES_ON,
    RUN,
    RUNS,
    SAVED,
    UNSTEADY,
    Runs,
    exported,
    furthest,
    steps_of,
    token_loss,
    weights_of,
)
from replay import Watched
from runs import metrics_of, settings
from textbook import ACTOR, CPU, ROLLOUT, ppo_config
from toy_workers import Join, OneEngine, Spoiled, Toy, TwoGenerate, group_of, updates

from posttrain.batch.columns import EveryTokenColumn, LastTokenColumn, MaskColumn, PairColumn, StoredColumn
from posttrain.config import load_config
from posttrain.controller.incidents import PeerLost, WorkerDied
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.controller.rank_host import RankHost, pack, unpack
from posttrain.controller.ray_store import RayHolder
from posttrain.conversations.conversation import TurnRequest
from posttrain.errors import UserError
from posttrain.kernels.train import can_train
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.rollout.weight_buckets import SyncError
from posttrain.trainer.main_ppo import run_ppo
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

ray = pytest.importorskip("ray")
from posttrain.controller.ray_cluster import RayCluster  # noqa: E402

pytestmark = pytest.mark.slow

RAYS_OWN = ["ray_init.num_cpus=12", "ray_kwargs.ray_init.runtime_env.env_vars.SEEN_BY_RANKS=1", "trainer.n_workers=4"]


@pytest.fixture(scope="module")
def cluster(forked):
    """A Ray whose processes are forks: each would import all of posttrain for itself. Another machine joins it, so it
    is not on the loopback interface."""
    forks = f"ray_kwargs.ray_init.runtime_env.py_executable={forked.python}"
    address = f"trainer.ray_init._node_ip_address={ray.util.get_node_ip_address()}"
    made = RayCluster(4, load_config([*RAYS_OWN, forks, address]).value("trainer.ray_init"))
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ranks(cluster):
    """`ranks(n)`: workers on n of four processes, or on this one; `ranks((n, m))`: m others of them generate, and know
    each other where they are several."""
    from posttrain.controller.ray_pool import RayWorkers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.cores.usable", lambda: 4)  # one thread each on every machine
        four = RayWorkers(4, CPU, cluster)

    def workers(counts: int | tuple[int, int]) -> Workers:
        if counts == 1:
            return LocalWorkers()
        count, others = counts if isinstance(counts, tuple) else (counts, 0)
        some = copy.copy(four)
        some.hosts, some.rollout_hosts, some.world_size = four.hosts[:count], four.hosts[count : count + others], count
        address = four.watch.fetch(four.hosts[0].free_address.remote())
        ranked = [(host, (rank, count, address)) for rank, host in enumerate(some.hosts)]
        if others:
            address = four.watch.fetch(some.rollout_hosts[0].free_address.remote())
        ranked += [(host, (number, others, address)) for number, host in enumerate(some.rollout_hosts)]
        four.watch.gather([host.build.remote("join", pack((Join, place, {}))) for host, place in ranked])
        some.close = lambda: None  # they serve further runs
        return some

    yield workers
    four.close()


def test_settings_for_ray_are_seen_in_its_resources_and_by_the_ranks(ranks, monkeypatch, capsys):
    from posttrain.controller import ray_pool
    from posttrain.trainer.run.process import open_workers

    assert ray.cluster_resources()["CPU"] == 12
    assert ranks(2).create("toy", Toy, None).variable("SEEN_BY_RANKS") == ["1", "1"]
    made = Mock(**{"return_value.cluster.was_there": True})
    monkeypatch.setattr(ray_pool, "RayWorkers", made)
    given = ["trainer.ray_init.num_cpus=3", "trainer.stopped_worker_timeout_s=7", "trainer.n_workers=2"]
    given += ["trainer.hung_worker_timeout_s=8", "trainer.placement_timeout_s=9"]
    open_workers(load_config(given).config, CPU, None)
    named = made.call_args.kwargs
    assert named["settings"] == {"num_cpus": 3}
    assert (named["stopped_s"], named["hung_s"], named["placement_s"]) == (7, 8, 9)
    assert "trainer.ray_init has no effect: this process is connected to a Ray already" in capsys.readouterr().out


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
    assert group.process.later().result() == first and group.process.on(1).result() == first[1]


def test_ranks_of_a_team_are_given_the_same_rows_and_answer_once(ranks):
    group = ranks(4).create("toy", Toy, SimpleNamespace(trainer=None, pairs=2))
    tensors = {"x": torch.arange(6), "attention_mask": torch.ones(6, 2)}
    data = DataProto.from_dict(tensors, {"uid": np.array(list("aabbcc"), dtype=object)})
    assert group.teams("summed_in_pairs").world_size == 2 and group.teams("doubled") is group
    rows, results = group.summed_in_pairs(data)
    assert sorted(rows[0] + rows[1]) == [*range(6)] and results == [(2 * at, 2 * sum(rows[at])) for at in (0, 1)]
    assert group.summed_in_pairs.on(1, data).result() == (2, 30)
    with pytest.raises(UserError, match="this cannot be had"):
        group.refuse_second.on(1).result()
    alone = ranks(2).create("toy", Toy, SimpleNamespace(trainer=None, pairs=1))
    assert alone.teams("summed_in_pairs") is alone


def test_the_error_of_one_rank_is_heard_while_others_are_at_work(ranks, tmp_path):
    group = ranks(2).create("toy", Toy, None)
    with pytest.raises(UserError, match="this cannot be had"):
        group.refuse_first(tmp_path / "go")
    (tmp_path / "go").touch()
    assert group.found_it.on(1).result()  # the other one was at it still


def test_ranks_tell_when_they_were_at_work_and_at_what(ranks):
    two = ranks(2)
    group = two.create("toy", Toy, None)
    two.spans()
    group.nap(0.01)
    told = [(name, who) for name, _, _, who in two.spans()]
    assert told == [("nap", "rank 0"), ("nap", "rank 1")] and two.spans() == []
    assert LocalWorkers().spans() == []


def test_ranks_write_traces_of_the_calls_that_they_answered_and_none_of_a_step_that_failed(ranks, tmp_path):
    workers = ranks(2)
    toy = workers.create("toy", Toy, None)
    with workers.traced(tmp_path / "step_3"):
        toy.process()
    traces = sorted(tmp_path.iterdir())
    assert [path.name for path in traces] == ["step_3.rank_0.json.gz", "step_3.rank_1.json.gz"]
    assert all(b'"toy.process"' in gzip.decompress(path.read_bytes()) for path in traces)
    with pytest.raises(ValueError), workers.traced(tmp_path / "step_4"):
        raise ValueError
    toy.process()
    assert sorted(tmp_path.iterdir()) == traces


def test_short_calls_that_follow_each_other_are_one_span_of_work():
    host = RankHost.__new__(RankHost)
    host.spans = []
    for name, begun, ended in (("decode", 1.0, 1.1), ("decode", 1.11, 1.3), ("decode", 2.0, 2.1), ("update", 2.1, 3.0)):
        host._note_span(name, begun, ended)
    host._note_span("state", 4.0, 4.0001)  # nothing to be seen
    assert host.take_spans() == [["decode", 1.0, 0.3], ["decode", 2.0, 0.1], ["update", 2.1, 0.9]] and host.spans == []


def test_there_are_as_many_processes_as_workers(ranks):
    for count in (2, 4):
        assert len(set(ranks(count).create("toy", Toy, None).process()) - {os.getpid()}) == count


def test_the_runner_can_be_an_actor_and_uses_the_ray_that_it_is_in(cluster, tiny_model, sums, tmp_path):
    from posttrain.trainer.main_ppo import TaskRunner

    runner = ray.remote(TaskRunner).options(num_cpus=0).remote()
    wanted = settings(tiny_model, sums, tmp_path, trainer__total_training_steps=1)
    assert ray.get(runner.run.remote(wanted), timeout=600).status == "finished"
    ray.kill(runner)
    here = RayCluster(2)
    here.start()  # this process is connected already
    here.stop()
    assert here.was_there and here.folder == "" and ray.is_initialized()


SETTINGS: dict[str, dict[str, Any]] = {"actor": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.shuffle": True}, "critic": {}}


@pytest.fixture(scope="module")
def alone(ranks, tiny_model):
    """By role, the metrics of two batches on one process."""
    groups = {role: group_of(ranks(1), tiny_model, SETTINGS[role], value=role == "critic") for role in SETTINGS}
    return {role: updates(group, value=role == "critic")[0] for role, group in groups.items()}


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("count, copies, together", [(4, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_settings_say_how_weights_and_rows_are_cut_and_no_number_changes(
    ranks, alone, tiny_model, role, count, copies, together
):
    section, value = {"actor": ACTOR, "critic": "critic"}[role], role == "critic"
    sizes = {
        f"{section}.fsdp_config.fsdp_size": count // copies,
        f"{section}.ulysses_sequence_parallel_size": together,
    }
    more = {} if value else {"reference": True}
    group = group_of(ranks(count), tiny_model, {**SETTINGS[role], **sizes}, value=value, **more)
    shape = (copies, count // copies) if copies > 1 else (count,)
    assert group.layouts() == [(shape, together)] * (1 if value else 2)  # the reference lies as the actor does
    metrics, _ = updates(group, value=value)
    for mine, theirs in zip(alone[role], metrics, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9, abs=1e-9)


def test_heads_that_ranks_cannot_share_are_refused_in_words(ranks, tiny_model):
    with pytest.raises(UserError, match=r"ulysses_sequence_parallel_size=4: .*4 heads of queries and 2 of keys"):
        group_of(ranks(4), tiny_model, {f"{ACTOR}.ulysses_sequence_parallel_size": 4}, value=False)


# -- whole runs on recorded rollouts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(ranks, tiny_model, sums, tmp_path_factory):
    return Runs(ranks, tiny_model, sums, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind, count", [*((kind, 2) for kind in RUNS), ("grpo", 4)])
def test_ten_steps_on_recorded_rollouts_are_those_of_one_process(runs, kind, count):
    one, many = runs(kind, "float32", 1), runs(kind, "float32", count)
    assert len(one.metrics) == len(many.metrics) == 10
    for step, (mine, theirs) in enumerate(zip(one.metrics, many.metrics, strict=True), 1):
        scale = token_loss(one, step)
        for name in [name for name in mine if name.endswith(("loss", "grad_norm"))]:
            allowed = 1e-5 * (scale if name.endswith("loss") else max(1.0, mine[name]))
            assert abs(theirs[name] - mine[name]) <= allowed, (step, name)
    if can_train(torch.zeros(1)):
        layers = 2 * 10  # of the tiny model, once in every step at least
        assert one.fused[0] >= layers and len(many.fused) == count and min(many.fused) >= layers


@pytest.mark.parametrize("kind, count", [*((kind, 4) for kind in RUNS), ("grpo", 2)])
def test_in_float64_the_weights_are_those_of_one_process_too(runs, kind, count):
    one, many = runs(kind, "float64", 1), runs(kind, "float64", count)
    assert furthest(weights_of(one.path), weights_of(many.path)) < 1e-9
    for mine, theirs in zip(one.metrics, many.metrics, strict=True):
        shared = {name: value for name, value in mine.items() if not name.startswith(UNSTEADY)}
        assert {name: theirs[name] for name in shared} == pytest.approx(shared, rel=1e-9, abs=1e-9)


def test_after_its_first_step_a_run_makes_no_column_of_tokens_on_the_driver(runs, monkeypatch):
    made: list[str] = []
    for kind in (StoredColumn, MaskColumn, LastTokenColumn, EveryTokenColumn, PairColumn):
        plain = kind.value
        monkeypatch.setattr(kind, "value", lambda own, plain=plain: (made.append(type(own).__name__), plain(own))[1])

    class Counting(RayPPOTrainer):
        by_step: ClassVar[list[int]] = []

        def _train_step(self) -> None:
            before = len(made)
            super()._train_step()
            self.by_step.append(len(made) - before)

    more = {**RUN, **RUNS["grpo"], "trainer.total_training_steps": 3, "tracking.samples_freq": 0}
    runs.free("not read", 2, more, Counting)
    first, *others = Counting.by_step
    assert first > 0 and others == [0, 0]  # the first batch is compared with the trainer, token by token


def test_an_adapter_that_a_run_begins_with_is_in_what_several_processes_generate(runs):
    adapter = runs("lora", "float32", 1).path / "checkpoints" / "global_step_10" / "huggingface"
    model = "actor_rollout_ref.model"
    given = {f"{model}.lora_rank": 4, f"{model}.lora_adapter_path": str(adapter), "trainer.total_training_steps": 1}
    assert runs.free("adapted", 2, given).metrics[0]["mismatch/logp_max"] < 1e-3


@pytest.mark.parametrize("kind", [kind for kind, *_ in GOES_ON])
def test_a_checkpoint_of_four_processes_goes_on_on_two_and_on_one(runs, kind, capsys):
    straight = runs(kind, "float64", 1)
    for count in (2, 1):
        checkpoints = runs.unsaved(kind, "float64", 4, f"{kind} on {count}")
        roles = (checkpoints / f"global_step_{SAVED}").glob("*/.metadata")
        assert {len(list(role.parent.glob("*.distcp"))) for role in roles} == {4}
        ended = runs.started(kind, "float64", count, f"{kind} on {count}")
        assert f"Resumed from {checkpoints / f'global_step_{SAVED}'}" in capsys.readouterr().out
        steps = [*range(1, steps_of("float64") + 1)]
        assert [line["step"] for line in metrics_of(ended.path) if "step" in line][-len(steps) :] == steps
        assert furthest(weights_of(straight.path), weights_of(ended.path)) < 1e-9
        assert furthest(exported(straight.path), exported(ended.path)) < 1e-9


# -- runs that end ----------------------------------------------------------------------------------------------------

SIX = {"trainer.total_training_steps": 6, "trainer.save_freq": 3}


def test_a_rank_that_is_killed_and_then_the_run_that_is_killed_change_no_bit_and_leave_nothing(runs, forked):
    straight = runs.free("straight", 2, SIX)
    wanted = {**settings(runs.model, runs.data, runs.folder / "killed"), **SIX, "trainer.n_gpus_per_node": 2}
    code = textwrap.dedent(KILLED).format(paths=[path for path in sys.path if path], settings=wanted)
    shared = set(os.listdir("/dev/shm"))
    killed = forked.run(code)
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-2000:] + killed.stderr[-2000:]
    first, second = (part.split()[0] for part in killed.stdout.split("Ray's folder: ")[1:])
    assert re.search(r"Rank 1 .* died in step 2, stage \w+\. Restart 1 of 3", killed.stdout)
    (snapshots,) = re.findall(r"Snapshots: (/dev/shm/\S+)", killed.stdout)
    for folder in (first, second, snapshots):
        check_nothing_is_left(folder, shared)
    path = runs.folder / "killed" / "test" / "run"
    assert "## Stacks of Rank 0" in (path / "incidents" / "001.md").read_text()
    assert [line["step"] for line in metrics_of(path)] == [1, 2, 3, 4]
    runs.free("killed", 2, SIX)
    assert metrics_of(path) == metrics_of(straight.path) and len(metrics_of(path)) == 6
    assert furthest(weights_of(path), weights_of(straight.path)) == 0.0


def test_rollout_workers_that_die_or_are_stopped_are_replaced_alone_and_change_no_bit(runs, forked):
    apart = {f"{ROLLOUT}.n_workers": 2, "trainer.stopped_worker_timeout_s": 2}
    straight = runs.free("straight apart", (1, 2), {**SIX, **apart})
    library = runs.folder / "all_in_store.py"  # of the replaced run alone: also responses as short as these
    library.write_text("from posttrain.controller import ray_store\nray_store.INLINE_BYTES = 0\n")
    wanted = {**settings(runs.model, runs.data, runs.folder / "replaced"), **SIX, **apart}
    wanted["actor_rollout_ref.model.external_lib"] = str(library)
    code = textwrap.dedent(REPLACED).format(paths=[path for path in sys.path if path], settings=wanted)
    ran = forked.run(code)
    assert "Result: 0 2 1" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-3000:]
    path = runs.folder / "replaced" / "test" / "run"
    pages = [page.read_text() for page in sorted((path / "incidents").iterdir())]
    assert "Rollout worker 1" in pages[0] and "died" in pages[0] and "stage: gen" in pages[0]
    assert "was stopped" in pages[1] and "Replacement 1 of 3" in pages[1] and "stage: sync" in pages[1]
    assert metrics_of(path) == metrics_of(straight.path)
    assert furthest(weights_of(path), weights_of(straight.path)) == 0.0


def is_lost(holder: Any) -> bool:
    try:
        RayHolder([holder.ref], 0).get()
    except PeerLost:
        return True
    return False


def test_what_a_rollout_worker_that_may_be_replaced_has_made_is_there_when_it_is_lost(cluster):
    from posttrain.controller.ray_pool import RayWorkers

    workers = RayWorkers(1, CPU, cluster, rollout=1)
    try:
        rank, rollout = workers.create("toy", Toy, None), workers.create("rollout", Toy, None)
        (own,) = rollout.keep_numbers(5000)
        assert workers.replace_rollout_workers()
        made = {count: rollout.keep_numbers(count)[0] for count in (10, 5000, 500_000)}
        ray.kill(workers.rollout_hosts[0])
        for count, holder in made.items():
            assert rank.sum_of(holder) == sum(range(count)) == int(holder.get()["numbers"][0].sum())
        until(lambda: is_lost(own), "for the loss of what was its own")
        with pytest.raises(WorkerDied, match=r"Rollout worker 0 .* died") as death:
            rank.sum_of(own)
        assert "Rows of a batch are lost" in str(death.value.__cause__)
    finally:
        workers.close()


def test_a_rank_that_is_stopped_or_dies_is_named_and_its_peers_error_is_not_taken_for_the_cause(cluster, tmp_path):
    from posttrain.controller import ray_ranks
    from posttrain.controller.incidents import WorkerStopped
    from posttrain.controller.ray_pool import RayWorkers

    told: list[str] = []
    workers = RayWorkers(2, CPU, cluster, tell=told.append, stopped_s=4, logs=tmp_path)
    try:
        group = workers.create("toy", Toy, None)
        _, second = group.process()
        group.nap(5.0)  # a worker that takes its time is not reported
        assert told == [] and group.meet() == [2, 2]
        with pytest.raises(ray_ranks.PeerLost, match=r"all of them are alive: .*Connection reset by peer"):
            group.lose_touch()
        os.kill(second, signal.SIGSTOP)
        named = rf"Rank 1 \(process {second} on .*\)"
        with pytest.raises(WorkerStopped, match=rf"{named} has been stopped .* 4 s") as stopped:
            group.meet()  # the first waits for it inside gloo
        (known,) = stopped.value.incident.stacks.values()  # of the first; the second cannot print them
        assert "in meet" in known and set(stopped.value.incident.calls.values()) == {"toy.meet"}
        assert [words.split(";")[0] for words in stopped.value.incident.states.values()] == ["waiting", "stopped"]
        os.kill(second, signal.SIGCONT)
        assert len(told) == 1 and f"Rank 1 (process {second} on" in told[0] and "kill -CONT" in told[0]
        assert group.meet() == [2, 2]
        with pytest.raises(ray_ranks.WorkerDied, match=f"{named} died") as death:
            group.lose_touch("its last words")
        log = tmp_path / "workers.log"
        assert str(log) in str(death.value) and "its last words" in log.read_text().splitlines()
        assert "Connection reset by peer" in str(death.value.__cause__)
    finally:
        workers.close()


# -- other workers generate than train -------------------------------------------------------------------------------

APART = [(1, 1), (2, 1), (1, 2)]
FLOAT64 = {**SIX, "actor_rollout_ref.model.dtype": "float64", f"{ACTOR}.use_kl_loss": True, "trainer.test_freq": 3}
HALF = {**FLOAT64, "trainer.total_training_steps": 3}


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
        assert made.call_args.kwargs["team"] == size and made.call_args.kwargs["rollout"] == 2
    monkeypatch.undo()
    workers = ray_pool.RayWorkers(1, CPU, cluster, rollout=2, team=2)
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


def test_of_torchruns_processes_the_first_makes_one_run_with_a_worker_for_each_and_the_others_leave(
    runs, ranks, monkeypatch
):
    given = {
        **settings(runs.model, runs.data, runs.folder / "torchrun", trainer__total_training_steps=1),
        "custom_reward_function.path": light_rewards.__file__,
        "custom_reward_function.name": "even_share",
    }
    line = [f"{key}={value}" for key, value in given.items()]
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("posttrain.cores.usable", lambda: 2)
    with pytest.raises(SystemExit) as left:
        load_config(line, environment=True)
    assert left.value.code == 0 and not (runs.folder / "torchrun").exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(rl, "open_workers", lambda config, *_: ranks(config.trainer.n_gpus_per_node))
    two = run_ppo(load_config(line, environment=True))
    assert two.status == "finished" and len(list((runs.folder / "torchrun").rglob("metrics.jsonl"))) == 1
    monkeypatch.delenv("WORLD_SIZE")
    one = run_ppo(load_config([*line, f"trainer.default_local_dir={runs.folder / 'alone'}"], environment=True))
    assert two.metrics[0].keys() >= one.metrics[0].keys() >= {"perf/memory_gb/gen", "perf/memory_gb/update_actor"}
    steady = {name: value for name, value in one.metrics[0].items() if not name.startswith(UNSTEADY)}
    assert {name: two.metrics[0][name] for name in steady} == pytest.approx(steady, rel=1e-4, abs=1e-5)


def test_a_ray_with_a_token_is_joined_by_its_address_with_the_token(cluster, forked):
    from posttrain.controller.ray_address import OWN

    code = """
        import os
        os.environ |= {{"RAY_ADDRESS": {address!r}, "RAY_AUTH_TOKEN": {token!r}}}
        from posttrain.controller.ray_cluster import RayCluster
        import ray
        cluster = RayCluster(1)
        cluster.start()
        print("machines:", len(ray.nodes()))
        cluster.stop()
    """
    address = ray.get_runtime_context().gcs_address
    joined = forked.run(textwrap.dedent(code).format(address=address, token=OWN))
    assert "machines: 1" in joined.stdout, joined.stderr[-2000:]


def test_a_machine_that_joins_is_waited_for_has_its_rank_and_leaves_when_it_is_gone(cluster, monkeypatch):
    """Two nodes of Ray, each with processes and a folder of its own, on this machine."""
    from posttrain.controller.ray_address import OWN
    from posttrain.controller.ray_cluster import check_same_programs
    from posttrain.controller.ray_node import RayNode, serve
    from posttrain.controller.ray_placement import Placement
    from posttrain.controller.ray_pool import RayWorkers

    told: list[str] = []
    counted, at_work = RayNode.ranks, threading.Event()

    def ranks_there(node: RayNode) -> int:
        found = counted(node)
        if found:
            at_work.set()  # a rank that goes before the machine has looked was never there for it
        return found

    monkeypatch.setattr(RayNode, "ranks", ranks_there)
    address = ray.get_runtime_context().gcs_address
    serving = threading.Thread(target=serve, args=(address, told.append, OWN), daemon=True)
    serving.start()
    placement = Placement("cpu", 2, 1, tell=told.append)
    here, there = placement.training
    rank = RayWorkers._host(Mock(world_size=1), 0, there, 1, CPU)
    check_same_programs([unpack(ray.get(rank.programs.remote()))], [there.machine.address])
    assert at_work.wait(60) and serving.is_alive()
    placement.close()  # ends the rank, too
    serving.join(60)
    assert here.machine.id == ray.get_runtime_context().get_node_id() != there.machine.id
    assert told[0].startswith("Waiting for up to 300 s (trainer.placement_timeout_s) for room in Ray: the training")
    assert told[-1] == "The run has left this machine."
