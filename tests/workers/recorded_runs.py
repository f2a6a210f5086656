"""Whole runs on recorded rollouts, each made once for its kind, dtype and number of processes; and their weights."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from light_rewards import even_share, rarely_right
from replay import LENGTHS, Watched
from runs import settings
from safetensors.torch import load_file
from sft_runs import settings as sft_settings

from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config import load_config
from posttrain.config.trainer import ROLES
from posttrain.config.trees import REWARD_MODEL, SFT
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.trainer.fsdp_sft_trainer import run_sft
from posttrain.trainer.ppo import runner as rl
from posttrain.trainer.reward_model_trainer import run_reward_model
from posttrain.trainer.supervised import loop as supervised

STEPS = 10
RUN = {
    "actor_rollout_ref.model.dtype": "float32",
    "data.max_response_length": max(LENGTHS),
    "trainer.total_training_steps": STEPS,
    "trainer.export_hf": "last",
}
FEWER = {"float64": 5}
"""Steps of those whose weights are compared to the last digits: what differs is seen after the first already."""
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
SAVED = 3
SIX = {"trainer.total_training_steps": 6, "trainer.save_freq": 3}
GOES_ON = [(kind, "float64", 4) for kind in ("ppo", "sft")]
"""These save after so many of their steps too: others go on from there."""


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


def steps_of(dtype: str) -> int:
    return FEWER.get(dtype, STEPS)


def exported(path: Path) -> dict[str, torch.Tensor]:
    """The weights of the Hugging Face folder that a run left."""
    newest = CheckpointManager(path / "checkpoints").newest()
    assert newest is not None
    return load_file(newest / "huggingface" / "model.safetensors")


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
    """Runs by kind, dtype and number of processes, each made once. `common` are settings of all that learn by RL."""

    def __init__(
        self, ranks: Any, model: Path, data: dict[str, Path], folder: Path, common: dict[str, Any] | None = None
    ) -> None:
        self.ranks, self.model, self.data, self.folder, self.common = ranks, model, data, folder, common or {}
        self.made: dict[tuple[str, str, int | tuple[int, int]], Ran] = {}
        self.recording = self._record()

    def _record(self) -> Path:
        """Responses to more prompts than any run draws, from one process that learns meanwhile."""
        workers = Watched(LocalWorkers())
        self._rl("recorded", workers, {**RUN, "data.train_batch_size": 8})
        kept = workers.groups["actor"].worker.rollout.engine.kept
        lengths = [len(output.token_ids) for _, output in kept.values()]
        assert min(lengths) <= 2 and max(lengths) == max(LENGTHS) and len(kept) == 240
        path = self.folder / "rollouts"
        path.write_bytes(pickle.dumps(kept))
        return path

    def __call__(self, kind: str, dtype: str, count: int | tuple[int, int]) -> Ran:
        key = (kind, dtype, count)
        if key not in self.made:
            between = {"trainer__save_freq": SAVED} if key in GOES_ON else {}
            self.made[key] = self.started(kind, dtype, count, f"{kind} {dtype} {count}", **between)
        return self.made[key]

    def unsaved(self, kind: str, dtype: str, count: int | tuple[int, int], name: str) -> Path:
        """The checkpoints of a copy in the folder `name`: of a run that ended before its last steps were saved."""
        copied = shutil.copytree(self(kind, dtype, count).path, self.folder / name / "test" / "run")
        shutil.rmtree(copied / "checkpoints" / f"global_step_{steps_of(dtype)}")
        return copied / "checkpoints"

    def started(self, kind: str, dtype: str, count: int | tuple[int, int], name: str, **more: Any) -> Ran:
        """A run in the folder `name`, which goes on from what lies there; `more` holds keys with __ for the dots."""
        workers = Watched(self.ranks(count), self.recording)
        more = {key.replace("__", "."): value for key, value in more.items()}
        steps = {"trainer.total_training_steps": steps_of(dtype)}
        if kind in ("sft", "reward model"):
            result = self._supervised(kind, name, workers, dtype, {**steps, **more})
        else:
            more |= {**RUN, **RUNS[kind], **steps, "actor_rollout_ref.model.dtype": dtype}
            if (self.folder / name).exists():  # what was recorded is of the first weights
                more["trainer.rollout_mismatch_tol"] = 100.0
            result = self._rl(name, workers, more)
        fused = [group.fused_layers() for role, group in workers.groups.items() if role != "rollout"]
        return Ran(result.metrics, result.path, [min(counts) for counts in zip(*fused, strict=True)])

    def _rl(
        self, name: str, workers: Workers, more: dict[str, Any], reward: Any = rarely_right, trainer: Any = None
    ) -> Any:
        given = {**settings(self.model, self.data, self.folder / name), **more, **self.common}
        with mock.patch.object(rl, "open_workers", lambda *_: workers):
            sizes = {"trainer.n_gpus_per_node": workers.world_size}
            sizes |= {own.key: size for role, own in ROLES.items() if (size := workers.own_size(role))}
            resolved = load_config({**given, **sizes})
            with rl.opened_training(resolved, reward=reward, trainer_class=trainer) as opened:
                return opened.fit()

    def free(self, name: str, count: int | tuple[int, int], more: dict[str, Any], trainer: Any = None) -> Any:
        """A run on what it samples itself; `count` is (processes that train, others that generate), or of all."""
        return self._rl(name, self.ranks(count), more, even_share, trainer)

    def watched(self, name: str, workers: Watched, more: dict[str, Any]) -> Any:
        """The same, of workers whose groups are looked at."""
        return self._rl(name, workers, more, even_share)

    def _supervised(self, kind: str, name: str, workers: Watched, dtype: str, more: dict[str, Any]) -> Any:
        given = sft_settings(
            self.model, self.folder / name, model__dtype=dtype, data__max_length=256, data__max_token_len_per_gpu=300
        )
        given |= {"data.train_batch_size": 4, "trainer.export_hf": "last", **more}
        given |= {"optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": 0}  # whatever the number of steps
        given["trainer.n_gpus_per_node"] = workers.world_size
        tree, run = {"sft": (SFT, run_sft), "reward model": (REWARD_MODEL, run_reward_model)}[kind]
        rows = [{"prompt": "?" * (1 + row % 5), "response": "answer " * (1 if row % 4 else 28)} for row in range(20)]
        if kind == "reward model":
            rows = [
                {"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {n}"}
                for n, row in enumerate(rows)
            ]
        with mock.patch.object(supervised, "open_workers", lambda *_: workers):
            resolved = load_config(given, provided=["data.train_files", "data.val_files"], tree=tree)
            return run(resolved, data=rows, val_data=rows[:3])


def token_loss(ran: Ran, step: int) -> float:
    """Mean of |loss| over the tokens of a step: where the ratio is about 1, of their advantages."""
    file = ran.path / "samples" / f"step_{step}.parquet"
    if not file.exists():
        return 1.0  # supervised: losses are means of what is positive
    import pyarrow.parquet as parquet

    rows = parquet.read_table(file, columns=["advantages"])["advantages"].to_pylist()
    return max(0.1, float(np.mean([abs(value) for row in rows for value in row])))  # in some steps no group has signal
