"""verl's `main_ppo` with vLLM: one training per request, in a process of its own; times are what it prints per step.

Rows are padded (`use_remove_padding=False`, sdpa), since packing needs flash-attn, which has no wheel. Master weights
and moments are float32 and passes bfloat16, as here. `trl` must not be installed in the same environment. Starting
takes minutes, mostly imports, so there are few workers for what is quick (the reward, the queues). `verl_stages.py`
prints each stage as it ends; a run that does not end in time is killed, and what it printed until then is reported.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from wire import serve  # pyright: ignore

STEP = re.compile(r"\bstep:(\d+)\b")
STAGE = re.compile(r"\bstage (\w+): ([\d.]+) s")
SPARE_S = 20.0  # of the deadline, for ending it


def numbers(line: str) -> dict[str, float]:
    """`step:3 - timing_s/gen:1.5 - ...` as a dict; values may be written as numpy prints them."""
    found = re.findall(r"([\w/@.-]+):(?:np\.\w+\()?(-?\d[\d.eE+-]*)\)?", line)
    return {name: float(value) for name, value in found}


def overrides(job: dict[str, Any], folder: Path, reward: Path) -> dict[str, Any]:
    rows = job["prompts"] * job["n"]
    micro = min(32, rows)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": True,  # no second pass for the old log-probs
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": job["prompts"],
        "data.max_prompt_length": job["prompt_tokens"],
        "data.max_response_length": job["tokens"],
        "data.shuffle": False,
        "actor_rollout_ref.model.path": job["model"],
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": job["checkpointing"],
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        **({"actor_rollout_ref.model.lora_rank": job["lora_rank"]} if job["lora_rank"] else {}),
        f"{actor}.ppo_mini_batch_size": job["prompts"],
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_kl_loss": False,
        f"{actor}.loss_agg_mode": "seq-mean-token-mean",
        f"{actor}.optim.lr": job["lr"],
        f"{actor}.optim.weight_decay": job["weight_decay"],
        f"{rollout}.name": "vllm",
        f"{rollout}.n": job["n"],
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": 0.4,
        f"{rollout}.ignore_eos": job["lengths"] == "fixed",
        f"{rollout}.max_num_seqs": rows,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.agent.num_workers": 4,
        f"+{rollout}.agent.agent_loop_manager_class": "verl_stages.Manager",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        "reward.custom_reward_function.path": reward,
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
        "trainer.logger": "[console]",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": job["steps"],
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.default_local_dir": folder / "out",
        **job["settings"],
    }


def start(job: dict[str, Any]):
    import pyarrow as pa
    import pyarrow.parquet as pq

    if job["device"] != "cuda":
        raise RuntimeError("verl trains on a GPU only; leave it out with --only")
    reward = Path(__file__).with_name("wire.py")

    def run(request: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="posttrain-bench-verl-") as name:
            folder = Path(name)
            rows = [
                {
                    "prompt": [{"role": "user", "content": text}],
                    "data_source": "bench",
                    "reward_model": {"style": "rule", "ground_truth": ""},
                    "extra_info": {"index": index},
                }
                for index, text in enumerate(job["texts"])
            ]
            pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
            given = [f"{key}={value}" for key, value in overrides(job, folder, reward).items()]
            limit = job["deadline"] and job["deadline"] - SPARE_S
            return follow([sys.executable, "-m", "verl.trainer.main_ppo", *given], limit)

    return {k: str(v) for k, v in overrides(job, Path("."), reward).items()}, run


def lines_of(process: subprocess.Popen[str], limit: float | None) -> Iterator[str]:
    """What it prints until it ends, or is ended after `limit` seconds; its own processes may hold the pipe longer."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    # A thread reads, because its Ray processes may hold the pipe open long after it was terminated.
    threading.Thread(target=read, daemon=True).start()
    until = None if limit is None else time.monotonic() + limit
    with suppress(queue.Empty):
        while (line := lines.get(timeout=until and max(0.0, until - time.monotonic()))) is not None:
            yield line
        process.wait()
        return
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=SPARE_S / 2)


def follow(command: list[str], limit: float | None = None) -> dict[str, Any]:
    """Run it, at most for `limit` seconds, and take each step's time when its line appears."""
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, here)), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    began = time.perf_counter()
    ends, steps, notes = [began], [], []
    for line in lines_of(process, limit):
        sys.stderr.write(line)
        now = time.perf_counter()
        if "stages begin" in line:
            notes.append(f"start {now - began:.0f} s")
        if (stage := STAGE.search(line)) and not steps:
            notes.append(f"{stage[1]} {float(stage[2]):.1f} s")
        if STEP.search(line) and "timing_s/step" in line:
            ends.append(now)
            steps.append(numbers(line))
    if not steps:
        far = f"; of its first step: {', '.join(notes)}" if notes else ""
        raise RuntimeError(f"verl ended with status {process.poll()} after {time.perf_counter() - began:.0f} s{far}")
    first = steps[0]["timing_s/step"]  # its own figure: the time before its line includes the start
    wall = [first, *(after - before for before, after in pairwise(ends[1:]))]
    peaks = [step["perf/max_memory_allocated_gb"] for step in steps if "perf/max_memory_allocated_gb" in step]
    return {
        "wall": wall,
        "inside": [step["timing_s/step"] for step in steps],
        "lengths": [step.get("response_length/mean", float("nan")) for step in steps],
        "stages": {key: [step.get(key) for step in steps] for key in steps[0] if key.startswith("timing_s/")},
        "start_s": ends[1] - began - first,
        **({"peak_gib": max(peaks)} if peaks else {}),
    }


if __name__ == "__main__":
    serve(start)
