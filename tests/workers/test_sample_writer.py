"""Samples of a run over two workers, written by a process of their own, are those that the driver writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
CHANGES = """
from posttrain.controller import rank_host
from posttrain.trainer.ppo import sample_writer
rank_host.INLINE_BYTES = 0  # also blocks as small as these go into the store
sample_writer.LARGE = {large}
write = sample_writer.SampleWriter.job

def job(self, folder, step, batch, sampling):
    with open({notes!r}, "a") as file:
        file.write(f"{{step}} ")
    return write(self, folder, step, batch, sampling)

sample_writer.SampleWriter.job = job
"""


def run(folder: Path, name: str, large: float) -> tuple[list[dict], str]:
    """(the samples of the last step, the steps that another process has written)"""
    notes, library = folder / f"{name}.txt", folder / f"{name}.py"
    library.write_text(CHANGES.format(large=large, notes=str(notes)))
    keys = ["preset=embedded", "trainer.n_workers=2", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    keys += ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.val_before_train=False", "trainer.test_freq=-1"]
    keys += [
        "trainer.device=cpu",
        "tracking.samples_freq=1",
        "actor_rollout_ref.actor.old_log_probs=trainer",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    keys += [f"trainer.default_local_dir={folder}", "trainer.project_name=p", f"trainer.experiment_name={name}"]
    command = [sys.executable, "-m", "posttrain.trainer.main_ppo", *keys]
    command += [f"actor_rollout_ref.model.external_lib={library}"]
    found = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    rows = pq.read_table(folder / "p" / name / "samples" / "step_2.parquet").to_pylist()
    return rows, notes.read_text() if notes.exists() else ""


def test_samples_written_by_another_process_are_those_that_the_driver_writes(tmp_path):
    (here, by_driver), (there, by_other) = run(tmp_path, "here", 1e12), run(tmp_path, "there", 0)
    assert (by_driver, by_other) == ("", "1 2 ")
    assert len(here) == 40 and here == there
    columns = {"uid", "response", "response_ids", "new_log_probs", "entropy", "ref_log_probs", "advantages", "mismatch"}
    assert columns <= here[0].keys() and all(row["response"] is not None for row in there)
    assert all(len(row["new_log_probs"]) == len(row["response_ids"]) for row in there)
