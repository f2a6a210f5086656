"""Workers in several processes give what one gives: on the same rows, the same losses, norms and weights. One Ray."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from light_rewards import even_share, rarely_right
from replay import LENGTHS, Watched
from runs import metrics_of, settings
from safetensors.torch import load_file
from sft_runs import PAIRS
from sft_runs import settings as sft_settings
from textbook import ACTOR, CPU, ROLLOUT, batch, ppo_config

from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config import load_config
from posttrain.config.supervised_tree import REWARD_MODEL, SFT
from posttrain.controller.dispatch import register, to_all
from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.controller.rank_host import RankHost
from posttrain.controller.wire import pack
from posttrain.engine.ranks import join_ranks, leave_ranks
from posttrain.errors import UserError
from posttrain.kernels.train import can_train
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.trainer.fsdp_sft_trainer import run_sft
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.reward_model_trainer import run_reward_model
from posttrain.trainer.supervised import runner as supervised
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from posttrain.workers.spread import by_groups, in_row_order

ray = pytest.importorskip("ray")
from posttrain.controller.ray_cluster import RayCluster  # noqa: E402

STEPS = 2


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_HEAD_ADDRESS"])
def test_a_ray_that_does_not_answer_is_named_at_once(monkeypatch, name):
    monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(UserError, match=rf"{name}=127.0.0.1:9: no Ray answers there .* unset {name}"):
        RayCluster(2).start()


def test_a_ray_that_is_not_found_is_named_too(monkeypatch):
    def nobody(**named):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(UserError, match=r"RAY_ADDRESS=auto: no Ray answers there \(Could not find any running Ray"):
        RayCluster(2).start()


def test_M_32_a_head_that_is_to_be_found_is_that_of_this_machine_or_started(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_HEAD_ADDRESS", "auto")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: address)
        assert RayCluster(2).address == address
    assert RayCluster(2).address is None  # it was there, and is gone


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

    @register(to_all)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


class Join:
    """A process becomes one of `count` ranks, whatever it was before."""

    def __init__(self, rank: int, count: int, address: str) -> None:
        leave_ranks()
        join_ranks(rank, count, address, CPU, timeout_s=300)


@pytest.fixture(scope="module")
def cluster():
    made = RayCluster(4)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def ranks(cluster):
    """`ranks(n)`: workers on n of four processes, or on this one."""
    from posttrain.controller.ray_group import RayWorkers, _fetched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 4)  # one thread each on every machine
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
        some.close = lambda: None  # they serve further runs
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


def test_ranks_tell_when_they_were_at_work_and_at_what(ranks):
    two = ranks(2)
    group = two.create("toy", Toy, None)
    two.spans()
    group.nap(0.01)
    told = [(name, who) for name, _, _, who in two.spans()]
    assert told == [("nap", "rank 0"), ("nap", "rank 1")] and two.spans() == []
    assert LocalWorkers().spans() == []


def test_short_calls_that_follow_each_other_are_one_span_of_work():
    host = RankHost.__new__(RankHost)
    host.spans = []
    for name, begun, ended in (("decode", 1.0, 1.1), ("decode", 1.11, 1.3), ("decode", 2.0, 2.1), ("update", 2.1, 3.0)):
        host._note_span(name, begun, ended)
    host._note_span("state", 4.0, 4.0001)  # nothing to be seen
    assert host.take_spans() == [["decode", 1.0, 0.3], ["decode", 2.0, 0.1], ["update", 2.1, 0.9]] and host.spans == []


def test_S0_54_there_are_as_many_processes_as_workers(ranks):
    for count in (2, 4):
        assert len(set(ranks(count).create("toy", Toy, None).process()) - {os.getpid()}) == count


def test_S0_70_S0_112_the_runner_can_be_an_actor_and_uses_the_ray_that_it_is_in(cluster, tiny_model, sums, tmp_path):
    from posttrain.trainer.main_ppo import TaskRunner

    runner = ray.remote(TaskRunner).options(num_cpus=0).remote()
    wanted = settings(tiny_model, sums, tmp_path, trainer__total_training_steps=1)
    assert ray.get(runner.run.remote(wanted), timeout=600).status == "finished"
    ray.kill(runner)
    here = RayCluster(2)
    here.start()  # this process is connected already
    here.stop()
    assert here.was_there and here.folder == "" and ray.is_initialized()


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

RUN = {
    "actor_rollout_ref.model.dtype": "float32",
    "data.max_response_length": max(LENGTHS),
    "trainer.total_training_steps": 10,
    "trainer.export_hf": "last",
}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.shuffle": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 300,
    },
    "ppo": {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3},
    "dapo": {
        "algorithm.filter_groups.enable": True,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 100,
    },
    "lora": {"actor_rollout_ref.model.lora_rank": 4},
    "sft": {},
    "reward model": {},
}


# Clocks; and what is divided by the variance of the returns, which is rounding where no response had a reward.
UNSTEADY = ("timing_s", "perf/", "critic/vf_explained_var")


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a run's newest checkpoint."""
    manager = CheckpointManager(path / "checkpoints")
    newest, found = manager.newest(), {}
    assert newest is not None
    for role in (folder.name for folder in newest.iterdir() if (folder / ".metadata").exists()):
        kinds = manager.describe(newest, role).items()
        into = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kinds}
        manager.load_tensors(newest, role, into)
        found |= {f"{role}.{name}": weight for name, weight in into.items()}
    return found


def exported(path: Path) -> dict[str, torch.Tensor]:
    """The weights of the Hugging Face folder that a run of 10 steps left."""
    return load_file(path / "checkpoints" / "global_step_10" / "huggingface" / "model.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys() and len(one) > 10
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@dataclass
class Ran:
    metrics: list[dict[str, Any]]
    path: Path
    fused: list[int]
    """Passes of fused layers by rank."""


class Runs:
    """Runs by kind, dtype and number of processes, each made once."""

    def __init__(self, ranks: Any, model: Path, data: dict[str, Path], folder: Path) -> None:
        self.ranks, self.model, self.data, self.folder = ranks, model, data, folder
        self.made: dict[tuple[str, str, int], Ran] = {}
        self.recording = self._record()

    def _record(self) -> Path:
        """Responses to more prompts than any run draws, from one process that learns meanwhile."""
        workers = Watched(LocalWorkers())
        self._rl("recorded", workers, {**RUN, "data.train_batch_size": 8})
        kept = workers.groups["actor"].worker.rollout.kept
        lengths = [len(output.token_ids) for _, output in kept.values()]
        assert min(lengths) <= 2 and max(lengths) == max(LENGTHS) and len(kept) == 240
        path = self.folder / "rollouts"
        path.write_bytes(pickle.dumps(kept))
        return path

    def __call__(self, kind: str, dtype: str, count: int) -> Ran:
        key = (kind, dtype, count)
        if key not in self.made:
            self.made[key] = self.started(kind, dtype, count, f"{kind} {dtype} {count}", 10)
        return self.made[key]

    def started(self, kind: str, dtype: str, count: int, name: str, steps: int) -> Ran:
        """A run in the folder `name`, which goes on from what lies there."""
        workers = Watched(self.ranks(count), self.recording)
        if kind in ("sft", "reward model"):
            result = self._supervised(kind, name, workers, dtype, steps)
        else:
            more = {**RUN, **RUNS[kind], "actor_rollout_ref.model.dtype": dtype, "trainer.total_training_steps": steps}
            if (self.folder / name).exists():  # what was recorded is of the first weights
                more["trainer.rollout_mismatch_tol"] = 100.0
            result = self._rl(name, workers, more)
        fused = [group.fused_layers() for group in workers.groups.values()]
        return Ran(result.metrics, result.path, [min(counts) for counts in zip(*fused, strict=True)])

    def _rl(self, name: str, workers: Workers, more: dict[str, Any], reward: Any = rarely_right) -> Any:
        given = {**settings(self.model, self.data, self.folder / name), **more}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rl, "open_workers", lambda *_: workers)
            resolved = load_config({**given, "trainer.n_gpus_per_node": workers.world_size})
            return rl.run_training(resolved, reward=reward)

    def free(self, name: str, count: int, more: dict[str, Any]) -> Any:
        """A run on what it samples itself."""
        return self._rl(name, self.ranks(count), more, even_share)

    def _supervised(self, kind: str, name: str, workers: Watched, dtype: str, steps: int) -> Any:
        given = sft_settings(
            self.model, self.folder / name, model__dtype=dtype, data__max_length=256, data__max_token_len_per_gpu=300
        )
        given |= {"trainer.total_training_steps": steps, "data.train_batch_size": 4, "trainer.export_hf": "last"}
        given |= {"optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": 0}  # whatever the number of steps
        given["trainer.n_gpus_per_node"] = workers.world_size
        tree, run = {"sft": (SFT, run_sft), "reward model": (REWARD_MODEL, run_reward_model)}[kind]
        rows = [{"prompt": "?" * (1 + row % 5), "response": "answer " * (1 if row % 4 else 28)} for row in range(20)]
        if kind == "reward model":
            rows = [
                {"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {n}"}
                for n, row in enumerate(rows)
            ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervised, "open_workers", lambda *_: workers)
            resolved = load_config(given, provided=["data.train_files", "data.val_files"], tree=tree)
            return run(resolved, data=rows, val_data=rows[:3])


@pytest.fixture(scope="module")
def runs(ranks, tiny_model, sums, tmp_path_factory):
    return Runs(ranks, tiny_model, sums, tmp_path_factory.mktemp("runs"))


def token_loss(ran: Ran, step: int) -> float:
    """Mean of |loss| over the tokens of a step: where the ratio is about 1, of their advantages."""
    file = ran.path / "samples" / f"step_{step}.parquet"
    if not file.exists():
        return 1.0  # supervised: losses are means of what is positive
    import pyarrow.parquet as parquet

    rows = parquet.read_table(file, columns=["advantages"])["advantages"].to_pylist()
    return max(0.1, float(np.mean([abs(value) for row in rows for value in row])))  # in some steps no group has signal


@pytest.mark.parametrize("count", [4, 2])
@pytest.mark.parametrize("kind", RUNS)
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


@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_checkpoint_of_four_processes_goes_on_on_two_and_on_one(runs, kind):
    straight = runs(kind, "float64", 1)
    half = runs.started(kind, "float64", 4, f"{kind} half", 7)
    roles = (half.path / "checkpoints" / "global_step_7").glob("*/.metadata")
    assert {len(list(role.parent.glob("*.distcp"))) for role in roles} == {4}
    for count in (2, 1):
        name = f"{kind} on {count}"
        shutil.copytree(runs.folder / f"{kind} half", runs.folder / name)
        ended = runs.started(kind, "float64", count, name, 10)
        assert [line["step"] for line in metrics_of(ended.path) if "step" in line][-10:] == [*range(1, 11)]
        assert furthest(weights_of(straight.path), weights_of(ended.path)) < 1e-9
        assert furthest(exported(straight.path), exported(ended.path)) < 1e-9


# -- runs that end ----------------------------------------------------------------------------------------------------

WAIT_S = 60.0  # about one second where nothing else runs
SIX = {"trainer.total_training_steps": 6, "trainer.save_freq": 3}
KILLED = """
    import os, signal, sys
    os.cpu_count = lambda: 2  # one thread each, as those that it is compared with
    sys.path[:0] = {paths!r}
    import posttrain
    from light_rewards import even_share
    from posttrain.controller.ray_cluster import RayCluster
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    start, update = RayCluster.start, RayPPOTrainer._update

    def told(self):
        start(self)
        print("Ray's folder:", self.folder, flush=True)

    def killed(self, batch, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, batch, step)

    RayCluster.start, RayPPOTrainer._update = told, killed
    posttrain.train({settings!r}, reward=even_share)
"""


def processes_of(folder: str) -> list[int]:
    """Processes that were started with this folder, or have a file open in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            if folder.encode() in (entry / "cmdline").read_bytes() or any(f.startswith(folder + "/") for f in files):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def check_nothing_is_left(folder: str, shared: set[str]) -> None:
    until = time.monotonic() + WAIT_S
    while (Path(folder).exists() or processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(folder).exists() and not processes_of(folder)
    assert set(os.listdir("/dev/shm")) <= shared


def test_six_steps_on_two_processes_are_three_killed_and_three_to_the_bit_and_the_killed_leaves_nothing(runs):
    straight = runs.free("straight", 2, SIX)
    wanted = {**settings(runs.model, runs.data, runs.folder / "killed"), **SIX, "trainer.n_gpus_per_node": 2}
    code = textwrap.dedent(KILLED).format(paths=[path for path in sys.path if path], settings=wanted)
    shared = set(os.listdir("/dev/shm"))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-2000:] + killed.stderr[-2000:]
    check_nothing_is_left(killed.stdout.partition("Ray's folder: ")[2].split()[0], shared)
    path = runs.folder / "killed" / "test" / "run"
    assert [line["step"] for line in metrics_of(path)] == [1, 2, 3, 4]
    runs.free("killed", 2, SIX)
    assert metrics_of(path) == metrics_of(straight.path) and len(metrics_of(path)) == 6
    assert furthest(weights_of(path), weights_of(straight.path)) == 0.0


def test_torchrun_trains_once_with_as_many_workers_as_it_starts_processes(tiny_model, tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(PAIRS))
    given = {
        **sft_settings(tiny_model, tmp_path / "many", data__train_files=str(rows)),
        "trainer.val_before_train": False,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "posttrain.trainer.fsdp_sft_trainer", *(f"{key}={value}" for key, value in given.items())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert ran.stdout.count("2 workers: starting Ray") == 1
    one = run_sft(sft_settings(tiny_model, tmp_path / "one"), data=PAIRS)
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "many" / "test" / "run") if "train/loss" in line]
    assert losses == pytest.approx([line["train/loss"] for line in one.metrics], rel=1e-5) and len(losses) == 2
