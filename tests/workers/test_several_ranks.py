"""Workers in several processes give what one gives: on the same rows, the same losses, norms and weights. One Ray."""

from __future__ import annotations

import gzip
import os
import re
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
    SIX,
    UNSTEADY,
    exported,
    furthest,
    steps_of,
    token_loss,
    weights_of,
)
from runs import metrics_of, settings
from textbook import ACTOR, CPU, ROLLOUT
from toy_workers import Toy, group_of, updates

from posttrain.batch.columns import EveryTokenColumn, LastTokenColumn, MaskColumn, PairColumn, StoredColumn
from posttrain.config import load_config
from posttrain.controller.incidents import PeerLost, WorkerDied
from posttrain.controller.pool import LocalWorkers, RolePool
from posttrain.controller.rank_host import RankHost, RayHolder, Refs, unpack
from posttrain.errors import UserError
from posttrain.kernels.train import can_train
from posttrain.protocol import DataProto
from posttrain.trainer.main_ppo import run_ppo
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

ray = pytest.importorskip("ray")
from posttrain.controller.ray_cluster import RayCluster  # noqa: E402

pytestmark = pytest.mark.slow


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
    assert {os.getpriority(os.PRIO_PROCESS, rank) for rank in first} == {os.getpriority(os.PRIO_PROCESS, 0)}
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
    library.write_text("from posttrain.controller import rank_host\nrank_host.INLINE_BYTES = 0\n")
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
        RayHolder(Refs([holder.ref]), 0).get()
    except PeerLost:
        return True
    return False


def test_what_a_rollout_worker_that_may_be_replaced_has_made_is_there_when_it_is_lost(cluster):
    from posttrain.controller.ray_pool import RayWorkers

    workers = RayWorkers(1, CPU, cluster, pools=[RolePool("rollout", 1, "n_workers")])
    try:
        rank, rollout = workers.create("toy", Toy, None), workers.create("rollout", Toy, None)
        (own,) = rollout.keep_numbers(5000)
        assert workers.replace_alone("rollout")
        made = {count: rollout.keep_numbers(count)[0] for count in (10, 5000, 500_000)}
        ray.kill(workers.own_hosts["rollout"][0])
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
