"""How a run ends: stopped by a signal, by numbers that are not finite, by validation alone; and what it leaves."""

import os
import re
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from light_rewards import out_of_range
from patience import gone
from runs import metrics_of, run, settings

from posttrain.errors import UserError
from posttrain.trainer.ppo import ray_trainer
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
from posttrain.trainer.run.result import TrainingStopped

SIGNALLED = """
    import os, signal, sys
    sys.path.insert(0, {folder!r})
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
    from runs import parity_reward
    import posttrain

    plain = RayPPOTrainer._update

    def update(self, batch, step):
        if step == 2:
            os.kill(os.getpid(), signal.{name})
        return plain(self, batch, step)

    RayPPOTrainer._update = update
    sys.exit(posttrain.train({settings!r}, reward=parity_reward).exit_status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_saves_and_leaves_and_the_run_goes_on(tiny_model, sums, tmp_path, name, forked):
    wanted = settings(tiny_model, sums, tmp_path, trainer__total_training_steps=4)
    code = textwrap.dedent(SIGNALLED).format(folder=str(Path(__file__).parent), settings=wanted, name=name)
    ended = forked.run(code)
    assert ended.returncode == 128 + getattr(signal, name), ended.stderr[-2000:]
    assert f"Stopped by {name} after step 2; the same command continues this run." in ended.stdout
    path = tmp_path / "test" / "run"
    assert [line["step"] for line in metrics_of(path)] == [1, 2]
    assert (path / "checkpoints" / "global_step_2" / "manifest.json").exists()
    rest = run(tiny_model, sums, tmp_path, trainer__total_training_steps=4)
    straight = run(tiny_model, sums, tmp_path / "straight", trainer__total_training_steps=4)
    assert metrics_of(rest.path) == metrics_of(straight.path)


def test_reward_workers_do_not_outlive_a_killed_run(tiny_model, sums, tmp_path, forked):
    wanted = settings(tiny_model, sums, tmp_path)
    code = textwrap.dedent(SIGNALLED).format(folder=str(Path(__file__).parent), settings=wanted, name="SIGKILL")
    code = code.replace(
        "os.kill(os", "print('worker', *[w.handle.process.pid for w in pool_of(self)], flush=True); os.kill(os"
    )
    code = code.replace("plain =", "pool_of = lambda trainer: trainer.reward_fn.pool._crew._workers\nplain =")
    ended = forked.run(code)
    assert ended.returncode == -9, ended.stderr[-2000:]
    pids = [int(word) for line in ended.stdout.splitlines() if line.startswith("worker") for word in line.split()[1:]]
    assert pids and gone(*pids)


def test_steps_with_updates_that_are_not_finite_are_counted_and_stop_the_run(
    tiny_model, sums, tmp_path, monkeypatch, capsys
):
    plain = ray_trainer.compute_advantage

    def broken(data, *args, **kwargs):
        plain(data, *args, **kwargs)
        data.batch["advantages"][0, 0] = float("nan")
        return data

    monkeypatch.setattr(ray_trainer, "compute_advantage", broken)
    with pytest.raises(TrainingStopped, match=r"In 2 steps in a row updates were skipped .*max_bad_steps"):
        more = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "trainer__max_bad_steps": 2}
        run(tiny_model, sums, tmp_path, trainer__total_training_steps=5, **more)
    assert "step 1: loss or gradient was not finite in 1 of 2 updates of the actor; skipped." in capsys.readouterr().out
    lines = metrics_of(tmp_path / "test" / "run")
    assert [line["actor/bad_steps"] for line in lines] == [1.0, 1.0]


def test_weights_stay_untouched_by_a_skipped_update(tiny_model, sums, tmp_path, monkeypatch):
    seen = []
    plain = RayPPOTrainer._update

    def update(self, batch, step):
        batch.batch["advantages"][0, 0] = float("inf")
        before = [w.detach().clone() for w in self.actor_rollout_wg.worker.engine.module.parameters()]
        out = plain(self, batch, step)
        after = self.actor_rollout_wg.worker.engine.module.parameters()
        seen.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return out

    monkeypatch.setattr(RayPPOTrainer, "_update", update)
    run(tiny_model, sums, tmp_path, trainer__total_training_steps=1)
    assert seen == [True]


def test_val_only_validates_and_makes_no_step(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, trainer__val_only=True, data__val_files=str(sums["test"]))
    assert result.steps == 0 and len(result.validation) == 1
    assert [line["step"] for line in metrics_of(result.path)] == [0]
    assert not list((result.path / "checkpoints").glob("global_step_*"))


def test_the_best_checkpoint_outlives_newer_ones(tiny_model, sums, tmp_path, monkeypatch):
    from posttrain.trainer.ppo.recorder import Recorder

    monkeypatch.setattr(Recorder, "_metric", lambda self, step: {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}[step])
    more = {"trainer__total_training_steps": 4, "trainer__save_freq": 1, "trainer__max_ckpt_to_keep": 1}
    result = run(tiny_model, sums, tmp_path, **more)
    kept = sorted(path.name for path in (result.path / "checkpoints").glob("global_step_*"))
    assert kept == ["global_step_2", "global_step_4"]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_exported_folder_loads_in_transformers_and_scores_alike(tiny_model, sums, tmp_path, monkeypatch, lora_rank):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainers = []
    plain = RayPPOTrainer.fit
    monkeypatch.setattr(RayPPOTrainer, "fit", lambda self: trainers.append(self) or plain(self))
    result = run(tiny_model, sums, tmp_path, trainer__export_hf="last", actor_rollout_ref__model__lora_rank=lora_rank)
    folder = result.path / "checkpoints" / "global_step_2" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode("12 + 30 = ?")])
    with torch.no_grad():
        ours = trainers[0].actor_rollout_wg.worker.engine.module(ids).logits
        torch.testing.assert_close(model(ids).logits, ours, rtol=0, atol=1e-5)
        start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        assert not torch.allclose(start(ids).logits, ours, atol=1e-3)


CUDA_IS_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
HOST_IS_FULL = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("place", "error", "stage", "words"),
    [
        ("workers.policy.actor_engine", CUDA_IS_FULL, "load", "The largest in load by the memory plan: actor w"),
        ("workers.rollout.advance", CUDA_IS_FULL, "gen", r"rollout.n=3: with 2, generate takes [\d.]+ MiB less"),
        (
            "workers.weight_sync.WeightProbe.dry_run",
            CUDA_IS_FULL,
            "check",
            "gradient_checkpointing=False: with True, update",
        ),
        ("workers.actor.dp_actor.DataParallelPPOActor.execute", HOST_IS_FULL, "update_actor", "update by the memory"),
    ],
    ids=["load", "gen", "check", "update"],
)
def test_out_of_memory_names_the_stage_its_tenants_and_the_settings(
    tiny_model, sums, tmp_path, monkeypatch, place, error, stage, words
):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(f"posttrain.{place}", full)
    if hasattr(error, "stage_of_the_run"):
        del error.stage_of_the_run
    error.add_note("(on rank 1)")  # as an error that comes from another process has
    first = re.escape(str(error).splitlines()[0])
    with pytest.raises(UserError, match=f"Out of memory in the stage {stage}: {first}\n(.|\n)*{words}") as found:
        run(tiny_model, sums, tmp_path)
    said = str(found.value).splitlines()
    assert said[1].startswith("  The largest in ") and re.search(r"actor \w+ [\d.]+ MiB.*all together", said[1])


def test_a_full_host_is_not_told_of_as_a_full_gpu(monkeypatch):
    from posttrain.planning import memory_plan as plans
    from posttrain.trainer.run.memory import explain_out_of_memory

    monkeypatch.setattr(plans, "find_device", lambda config: plans.Device("cuda", 80 * plans.GIB, "a GPU"))
    said = explain_out_of_memory(None, HOST_IS_FULL).splitlines()
    assert len(said) == 2 and said[1].startswith("  This is the host's memory, not the GPU's")


def test_a_reward_that_fails_is_recorded_with_its_sample_and_the_run_goes_on(tiny_model, sums, tmp_path):
    import pyarrow.parquet as pq

    def sometimes(data_source, solution_str, ground_truth, extra_info=None):
        if sum(map(ord, solution_str)) % 2:
            raise ValueError("odd one out")
        return 1.0

    result = run(tiny_model, sums, tmp_path, reward=sometimes, reward__failure_score=-1.0)
    rows = pq.read_table(result.path / "samples" / "step_1.parquet").to_pylist()
    failed = [row for row in rows if row["error"]]
    assert 0 < len(failed) < len(rows)
    assert all(row["score"] == -1.0 and "odd one out" in row["error"] for row in failed)


def fails_always(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("no key in the environment")


@pytest.mark.parametrize("validates", [False, True])
def test_a_run_whose_rewards_all_fail_stops_at_its_first_batch_and_says_why(tiny_model, sums, tmp_path, validates):
    from posttrain.rewards.types import AllFailed

    more = {"data__val_files": str(sums["test"])} if validates else {}
    with pytest.raises(AllFailed, match=r"(?s)failed on all 12 responses.*no key in the environment.*reward try"):
        run(tiny_model, sums, tmp_path, reward=fails_always, **more)
    path = tmp_path / "test" / "run"
    assert metrics_of(path) == [] and not list(path.glob("checkpoints/global_step_*"))


def test_an_unknown_data_source_under_the_default_reward_file_stops_the_run(tiny_model, sums, tmp_path, capsys):
    """As `./train.sh` does it: its reward file asks the built-in scorers, which know nothing of this source."""
    import json

    from posttrain.cli import main

    rows = [{"prompt": f"{n} + 1 = ?", "ground_truth": str(n + 1), "data_source": "no/such_source"} for n in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    wanted = settings(tiny_model, {"train": tmp_path / "rows.json"}, tmp_path)
    folder = Path(__file__).parents[2]
    assert main(["train", f"--train-sh={folder}", *(f"{key}={value}" for key, value in wanted.items())]) == 2
    said = capsys.readouterr().err
    assert "failed on all 12 responses" in said and "no built-in scorer for data source 'no/such_source'" in said


def test_a_reward_that_worked_before_has_three_batches_to_come_back():
    from posttrain.rewards.types import AllFailed, FailureWatch

    watch, bad = FailureWatch(), ["away", "away"]
    watch.check(["away", None])
    watch.check(bad)
    watch.check(bad)
    watch.check([None, None])
    watch.check(bad)
    watch.check(bad)
    with pytest.raises(AllFailed, match=r"all 2 responses of each of the last 3 batches(.|\n)*away"):
        watch.check(bad)


def test_scores_out_of_range_are_failures_and_the_run_goes_on(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, reward=out_of_range, reward__failure_score=-1.0)
    assert result.status == "finished" and result.steps == 2
    lines = metrics_of(result.path)
    assert sum(line["reward/failures"] for line in lines) > 0 and all(-1 <= line["reward_mean"] <= 1 for line in lines)


def _process() -> dict[str, Any]:
    """What of a process a run might leave changed."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    streams = (sys.stdout, sys.stderr, warnings.showwarning, list(warnings.filters))
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    of_torch = (torch.are_deterministic_algorithms_enabled(), fills, torch.get_num_threads(), torch.get_default_dtype())
    theirs = ("PYTEST", "TOKENIZERS_", "HF_")  # libraries set these
    place = (Path.cwd(), {k: v for k, v in os.environ.items() if not k.startswith(theirs)}, torch.is_grad_enabled())
    return {"signals": signals, "streams": streams, "threads": threads, "torch": of_torch, "place": place}


def _changed(before: dict[str, Any]) -> dict[str, Any]:
    """What is not as before. Threads of earlier tests may end meanwhile; only new ones count, and only those that stay:
    the watcher of chat templates, for one, ends by itself after two idle seconds."""
    now = _process()
    end = time.monotonic() + 20
    while (new := Counter(now["threads"]) - Counter(before["threads"])) and time.monotonic() < end:
        time.sleep(0.05)
        now = _process()
    del now["threads"]
    return {name: found for name, found in now.items() if found != before[name]} | ({"threads": new} if new else {})


def test_a_run_leaves_its_process_as_it_was(tiny_model, sums, tmp_path):
    before = _process()
    more = {"trainer__deterministic": True, "trainer__total_training_steps": 1}
    run(tiny_model, sums, tmp_path, **more)
    assert _changed(before) == {}
    with pytest.raises(UserError):
        run(tiny_model, sums, tmp_path / "failing", reward=lambda **_: 1 / 0, **more)
    assert _changed(before) == {}
