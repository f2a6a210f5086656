"""Reward model, critic and reference on workers of their own, and roles of a user's own trainer: no number changes."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from left_behind import LOST, REFERENCE_LOST
from recorded_runs import SIX, UNSTEADY, Runs, furthest, weights_of
from runs import metrics_of
from runs import settings as common
from textbook import ACTOR

from posttrain.controller.group import all_of, register, to_all
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.own_roles import OwnRole
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.workers.fsdp_workers import CriticWorker, ReferenceWorker, RewardModelWorker

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow


class Noted:
    """Counts the passes that its process has made."""

    passes = 0

    @register(to_all, all_of)
    def work(self) -> tuple[int, int]:
        return os.getpid(), self.passes


class Scorer(Noted, RewardModelWorker):
    def compute_rm_score(self, data: DataProto) -> DataProto:
        self.passes += 1
        return super().compute_rm_score(data)


BALLAST_GB = 0.4


def take_memory() -> None:
    torch.ones(int(BALLAST_GB * 1e9 / 4))


class Critic(Noted, CriticWorker):
    def compute_values(self, data: DataProto, passes: Any = None) -> DataProto:
        self.passes += 1
        take_memory()
        return super().compute_values(data, passes)

    def update_critic(self, plan: Any) -> Any:
        take_memory()
        return super().update_critic(plan)


class Reference(Noted, ReferenceWorker):
    def compute_ref_log_prob(self, data: DataProto, passes: Any = None) -> DataProto:
        self.passes += 1
        take_memory()
        return super().compute_ref_log_prob(data, passes)


class Apart(RayPPOTrainer):
    """Tells at its end which processes did what."""

    critic_class, reward_model_class, reference_class = Critic, Scorer, Reference
    seen: ClassVar[dict[str, list[tuple[int, int]]]] = {}

    begun: ClassVar[list[int]] = []

    def _score(self, batch: DataProto) -> DataProto:
        if self.model_reward and self.model_reward.groups:  # groups that were sent while others were generated
            Apart.begun.append(len(self.model_reward.groups._calls))
        return super()._score(batch)

    def fit(self) -> Any:
        result = super().fit()
        groups = {"reward_model": self.rm_wg, "critic": self.critic_wg, "reference": self.groups.reference}
        Apart.seen = {role: group.work() for role, group in groups.items() if group is not None}  # pyright: ignore
        return result


class Light(Runs):
    """Runs on what they sample themselves."""

    def _record(self) -> Path:
        return Path()


@pytest.fixture(scope="module")
def light(ranks, tiny_model, sums, tmp_path_factory):
    return Light(ranks, tiny_model, sums, tmp_path_factory.mktemp("pools"))


@pytest.fixture(scope="module")
def settings(rm_same):
    return {
        **SIX,
        "trainer.total_training_steps": 3,
        "trainer.save_freq": 2,
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.model.dtype": "float64",
        "critic.optim.lr": 1e-3,
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        "reward_model.enable": True,
        "reward_model.model.path": str(rm_same),
        "reward_model.model.dtype": "float64",
    }


@pytest.fixture(scope="module")
def inside(light, settings):
    return light.free("inside", 1, settings)


def check_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(metrics_of(one.path), metrics_of(other.path), strict=True):
        shared = {name: value for name, value in mine.items() if not name.startswith((*UNSTEADY, "sync/"))}
        assert {name: theirs[name] for name in shared} == pytest.approx(shared, rel=1e-7, abs=1e-9)
    assert furthest(weights_of(one.path), weights_of(other.path)) < 1e-9


@pytest.mark.parametrize(
    "training, pools",
    [
        (1, {"reward_model": 1, "critic": 1, "reference": 1}),
        (1, {"reward_model": 2, "rollout": 1}),
        (1, {"critic": 2}),
        (2, {"reference": 2}),
    ],
)
def test_roles_on_workers_of_their_own_give_the_numbers_of_one_process(light, settings, inside, training, pools):
    name, Apart.begun = f"apart {training} {sorted(pools.items())}", []
    ended = light.free(name, (training, pools), settings, Apart)
    check_same(inside, ended)
    assert Apart.begun == [4] * 3 * ("reward_model" in pools)
    of_role = {role: pids for role, pids in Apart.seen.items() if role in pools}
    processes = [pid for own in of_role.values() for pid, _ in own]
    assert len(set(processes)) == len(processes) == sum(pools.values()) - pools.get("rollout", 0)
    assert os.getpid() not in processes
    # Three steps: of four groups each, all of which one reward worker or the other has scored alone.
    wanted = {"reward_model": 12, "critic": 3, "reference": 3}
    for role, own in of_role.items():
        passes = [count for _, count in own]
        assert sum(passes) >= wanted[role] if role == "reward_model" else set(passes) == {wanted[role]}
        assert min(passes) > 0
    measured = ended.metrics[-1]
    spent = measured["perf/throughput"] * measured["perf/time_per_step"]
    assert measured["perf/total_num_tokens"] / spent == pytest.approx(training + sum(pools.values()))
    assert {f"perf/{role}_memory_gb" for role in pools} <= measured.keys()
    # What a role computes beside other stages counts for its own.
    for role, stages in {"critic": ("values", "update_critic"), "reference": ("ref",)}.items():
        for stage in stages if role in pools else ():
            of_role = f"perf/{role}_memory_gb"
            assert measured[f"{of_role}/{stage}"] > measured[f"{of_role}/adv"] + 0.9 * BALLAST_GB


def test_a_lost_reward_worker_is_replaced_alone_a_lost_critic_restarts_all_and_no_bit_changes(light, settings, forked):
    pools = {"reward_model": 1, "critic": 1}
    four = {**settings, "trainer.total_training_steps": 4}
    straight = light.free("straight", (1, pools), four)
    wanted = {**common(light.model, light.data, light.folder / "lost"), **four}
    wanted |= {f"{role}.n_workers": 1 for role in pools}
    ran = forked.run(textwrap.dedent(LOST).format(paths=[path for path in sys.path if path], settings=wanted))
    assert "Result: 1 1" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-3000:]
    path = light.folder / "lost" / "test" / "run"
    pages = [page.read_text() for page in sorted((path / "incidents").iterdir())]
    assert "Reward model worker 0" in pages[0] and "Replacement 1 of 3" in pages[0]
    assert "Critic worker 0" in pages[1] and "Restart 1 of 3" in pages[1]
    assert metrics_of(path) == metrics_of(straight.path)
    assert furthest(weights_of(path), weights_of(straight.path)) == 0.0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_of_the_reference_is_replaced_without_the_policy_and_no_bit_changes(
    light, settings, forked, workers
):
    four = {**settings, "trainer.total_training_steps": 4, "reward_model.enable": False}
    straight = light.free(f"undisturbed {workers}", (1, {"reference": workers}), four)
    name = f"without reference {workers}"
    wanted = {**common(light.model, light.data, light.folder / name), **four}
    wanted["actor_rollout_ref.ref.n_workers"] = workers
    code = REFERENCE_LOST.format(paths=[path for path in sys.path if path], settings=wanted, last=workers - 1)
    ran = forked.run(textwrap.dedent(code))
    assert "Result: 0 2 1" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-3000:]
    path = light.folder / name / "test" / "run"
    pages = [page.read_text() for page in sorted((path / "incidents").iterdir())]
    assert f"Reference worker {workers - 1}" in pages[0] and "Replacement 1 of 3" in pages[0]
    assert "Reference worker 0" in pages[1] and "Replacement 1 of 3" in pages[1]
    assert metrics_of(path) == metrics_of(straight.path)
    assert furthest(weights_of(path), weights_of(straight.path)) == 0.0


def test_a_checkpoint_of_one_process_goes_on_with_a_critic_of_its_own(light, settings, inside):
    copied = shutil.copytree(inside.path, light.folder / "parted" / "test" / "run")
    shutil.rmtree(copied / "checkpoints" / "global_step_3")
    check_same(inside, light.free("parted", (1, {"critic": 2}), settings))


# -- roles of a user's own --------------------------------------------------------------------------------------------


class Judge:
    """Counts the letters `a` of a response's row by its sum of tokens; any method takes rows and gives as many."""

    def __init__(self, config: Any) -> None:
        self.scale = config.trainer.seed

    def judge(self, data: DataProto) -> DataProto:
        assert len(set(data.non_tensor_batch["uid"])) * 2 == len(data)  # groups stay together
        made = data.batch["responses"].sum(-1) * self.scale
        return DataProto.from_dict({"judged": made}, {"judge": [os.getpid()] * len(data)})

    @register(to_all, all_of)
    def process(self) -> int:
        return os.getpid()


class Judged(RayPPOTrainer):
    own_roles: ClassVar[dict[str, OwnRole]] = {"judge": OwnRole(Judge, n_workers=2)}
    seen: ClassVar[list[DataProto]] = []

    def _score(self, batch: DataProto) -> DataProto:
        scored = super()._score(batch)
        scored.union(self.own_wg["judge"].judge(scored))
        assert sorted(set(scored.non_tensor_batch["judge"])) == sorted(self.own_wg["judge"].process())
        Judged.seen.append(scored.select(["judged", "responses"], ["judge"]))
        return scored


def test_a_users_own_class_works_in_a_pool_of_its_own(light, settings):
    Judged.seen = []
    given = {**settings, "trainer.seed": 3, "trainer.total_training_steps": 1, "reward_model.enable": False}
    light.free("judged", (1, {"judge": 2}), given, Judged)
    (batch,) = Judged.seen
    assert torch.equal(batch.batch["judged"], 3 * batch.batch["responses"].sum(-1)) and len(batch) == 8
    assert len(set(batch.non_tensor_batch["judge"])) == 2 and os.getpid() not in batch.non_tensor_batch["judge"]


class Steps:
    """Each worker adds up what it was given."""

    def __init__(self, config: Any) -> None:
        self.seen = 0.0

    def shift(self, data: DataProto) -> DataProto:
        self.seen += float(data.batch["responses"].sum())
        return DataProto.from_dict({"shift": torch.full((len(data),), self.seen % 7, dtype=torch.float64)})

    def save(self, folder: Path) -> None:
        (folder / "seen").write_text(repr(self.seen))

    def load(self, folder: Path) -> None:
        self.seen = float((folder / "seen").read_text())


class Shifted(RayPPOTrainer):
    own_roles: ClassVar[dict[str, OwnRole]] = {"counter": OwnRole(Steps, n_workers=2)}

    def _score(self, batch: DataProto) -> DataProto:
        scored = super()._score(batch)
        scored.union(self.own_wg["counter"].shift(scored))
        scored.batch["token_level_rewards"] = scored.batch["token_level_scores"] * scored.batch["shift"][:, None]
        return scored


def test_each_worker_of_a_users_role_goes_on_from_its_own_state(light, settings):
    given = {**settings, "trainer.total_training_steps": 4, "reward_model.enable": False}
    straight = light.free("counted", (1, {"counter": 2}), given, Shifted)
    copied = shutil.copytree(straight.path, light.folder / "counted on" / "test" / "run")
    shutil.rmtree(copied / "checkpoints" / "global_step_4")
    resumed = light.free("counted on", (1, {"counter": 2}), given, Shifted)
    assert metrics_of(resumed.path) == metrics_of(straight.path)
    assert furthest(weights_of(resumed.path), weights_of(straight.path)) == 0.0
    states = straight.path / "checkpoints" / "global_step_4" / "own_roles" / "counter"
    assert len({(states / f"worker_{number}" / "seen").read_text() for number in (0, 1)}) == 2


PAGE = """
    import runpy, sys
    sys.path[:0] = {paths!r}
    from posttrain import cores
    cores.usable = lambda: 3
    sys.argv = {arguments!r}
    runpy.run_path("judged.py", run_name="__main__")
"""


def test_the_code_of_the_page_has_a_judge_in_each_of_two_processes(forked, tiny_model, sums, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parents[2] / "docs" / "pools.md").read_text()
    (tmp_path / "judged.py").write_text(page.split("```python\n")[1].split("```")[0])
    given = common(tiny_model, sums, tmp_path / "outputs")
    arguments = ["judged.py", *(f"{key}={value}" for key, value in given.items())]
    monkeypatch.chdir(tmp_path)
    ran = forked.run(textwrap.dedent(PAGE).format(paths=[path for path in sys.path if path], arguments=arguments))
    path = tmp_path / "outputs" / "test" / "run"
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "1 worker(s) to train and 2 of the judge" in ran.stdout and "Judge: processes" in ran.stdout
    added = [line["critic/rewards/mean"] - line["critic/score/mean"] for line in metrics_of(path)]
    assert len(added) == 2 and all(0.1 / 6 <= more + 1e-6 < 0.1 for more in added)  # a tenth of 1 / length, at most 6
