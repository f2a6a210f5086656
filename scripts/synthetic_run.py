"""A run directory as large as wanted, made without training.

    python scripts/synthetic_run.py FOLDER --steps 1000 --responses 1024

Metrics follow plausible curves with noise, responses are of several scripts, some failed, some were cut off, and some
try to be markup. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config.root import PPOConfig
from posttrain.tracking.loggers import JsonlLogger
from posttrain.tracking.rundir import DIAGNOSIS, TIMELINE, RunDirectory, append_line
from posttrain.tracking.samples import sample_table, write_samples, write_validation
from posttrain.tracking.status import write_origin, write_status

N = 8
TEXTS = (
    "Let us add the numbers step by step: the sum of both is {a}, so the answer is \\boxed{{{b}}}. ",
    "我们先算个位，再算十位。所以答案是 {b}。检查一遍：{a} 加 {b}。",
    "الجواب هو {b} لأن المجموع {a}. ",
    "$$\\int_0^{a} x^2\\,dx = \\frac{{{a}^3}}{{3}}$$ and therefore $x = {b}$. ",
    "```python\ndef add(a, b):\n    return a + b  # {a}\nprint(add({a}, {b}))\n```\n",
    "<script>alert({a})</script><img src=x onerror=alert({b})> & <b>bold</b> ",
)
STAGES = {"gen": 4.0, "reward": 0.4, "old_log_prob": 0.8, "ref": 0.7, "adv": 0.1, "update_actor": 3.0, "sync": 0.2}


def make_run(
    folder: Path,
    *,
    steps: int,
    responses: int,
    seed: int = 0,
    tokens: int = 48,
    name: str = "synthetic",
    lr: float = 1e-6,
) -> Path:
    """Write `folder/made/<name>` and give its path; every 50th step has a validation."""
    with RunDirectory(folder, "made", name) as run:
        run.write_config(_settings(seed, steps, responses, lr))
        write_origin(run.path, 0)
        rng, start = np.random.default_rng(seed), time.time() - steps * 10.0
        clock = iter(start + 10.0 * step for step in range(steps + 2))
        logger = JsonlLogger(run.metrics, lambda: next(clock))
        logger.log(0, {"val/sums/mean@1": 0.2})
        for step in range(1, steps + 1):
            logger.log(step, _metrics(step, steps, rng, math.log10(lr / 1e-6)))
            write_samples(run.samples, step, _batch(step, responses, tokens, rng), sampling={"temperature": 1.0})
            if step % 50 == 0 or step == steps:
                write_validation(
                    run.samples, step, [sample_table(step, _batch(step, min(responses, 64), tokens, rng, "val-"))]
                )
            _stages(run.path, step, start + 10.0 * (step - 1))
            if step % 7 == 0:
                advice = (
                    f"{60 + step % 40}% of the groups have equal rewards and give no gradient; take harder prompts."
                )
                append_line(run.path / DIAGNOSIS, {"step": step, "advice": [advice]})
        logger.close()
        write_status(run.path, "finished", steps, steps)
        _vocabulary(run.path)
    return run.path


def _settings(seed: int, steps: int, responses: int, lr: float) -> dict[str, Any]:
    """Those of a GRPO run, whole, and a reward server's secrets, which no page may show."""
    config = PPOConfig()
    config.algorithm.adv_estimator = "grpo"
    config.trainer.seed, config.trainer.total_training_steps, config.trainer.project_name = seed, steps, "made"
    config.data.train_batch_size, config.data.max_response_length = responses // N, 64
    config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.use_kl_loss = lr, True
    config.actor_rollout_ref.rollout.n = N
    tree = config.to_dict()
    tree.setdefault("reward", {})["server"] = {"api_key": "never shown", "url": "http://user:secret@host/score"}
    return tree


def _metrics(step: int, steps: int, rng: np.random.Generator, faster: float) -> dict[str, float]:
    """`faster`: powers of ten by which the learning rate is above the usual one."""
    done, noise = step / steps, lambda scale: float(rng.normal(0, scale))
    reward = 0.2 + 0.7 * (1 - math.exp(-4 * (1 + faster) * done)) + noise(0.02)
    found = {
        "reward_mean": reward,
        "right/mean": reward - 0.05 + noise(0.01),
        "reward_std": 0.4 - 0.2 * done + noise(0.01),
        "kl_loss": 0.05 * (1 + faster) * done + abs(noise(0.002)),
        "actor/entropy": 1.5 * math.exp(-2 * (1 + faster) * done) + noise(0.02),
        "actor/pg_clipfrac": 0.02 + abs(noise(0.005)),
        "actor/grad_norm": 0.8 + abs(noise(0.2)),
        "actor/lr": 1e-6,
        "response_length": 30 + 20 * done + noise(1),
        "response_length/clip_ratio": 0.05 + abs(noise(0.01)),
        "groups/no_signal": 0.3 + 0.4 * done + noise(0.02),
        "groups/all_right": 0.1 + 0.5 * done,
        "groups/all_wrong": 0.2 * (1 - done),
        "mismatch/logp_mean": 1e-4 + abs(noise(1e-5)),
        "mismatch/logp_max": 2e-3 + abs(noise(1e-4)),
        "reward/acc/mean": 0.2 + 0.7 * done,
        "reward/failures": float(step % 97 == 0),
        "perf/throughput": 9000 + noise(300),
        "perf/memory_gb": 20 + 2 * done,
        "perf/memory_gb/gen": 18 + 2 * done,
        "perf/memory_gb/update_actor": 20 + 2 * done,
    }
    if step % 10 == 0:
        found["sync/probe_max"] = 1e-4 + abs(noise(1e-5))
    if step % 50 == 0:
        found["val/sums/mean@1"] = 0.2 + 0.6 * done + noise(0.01)
    times = {f"timing_s/{stage}": seconds * (1 + abs(noise(0.1))) for stage, seconds in STAGES.items()}
    return found | times | {"timing_s/step": math.fsum(times.values()), "perf/time_per_step": math.fsum(times.values())}


def _batch(step: int, rows: int, width: int, rng: np.random.Generator, prefix: str = "") -> dict[str, Any]:
    lengths = rng.integers(width // 2, width + 1, rows)
    present = (np.arange(width)[None] < lengths[:, None]).astype(np.int64)
    rollout = np.where(present, np.round(-rng.exponential(0.5, (rows, width)), 3), 0).astype(np.float32)
    gaps = rng.normal(0, 1e-3, (rows, width)).astype(np.float32)
    scores = (rng.random(rows) < 0.5).astype(float)
    scores[:N] = 1.0  # as in most runs, some groups have no signal
    on_tokens = np.zeros((rows, width))
    on_tokens[np.arange(rows), lengths - 1] = scores
    groups = [row // N for row in range(rows)]
    first = (step - 1) * (rows // N)
    texts = [TEXTS[(step + row) % len(TEXTS)].format(a=row, b=step + row) * 2 for row in range(rows)]
    texts = [f"{text}needle-{step}-{row}" if row % 128 == 0 else text for row, text in enumerate(texts)]
    error = "NameError: name 'parse' is not defined\n  reward.py, line 3, in compute_score: parse(text)"
    return {
        "prompts": rng.integers(97, 122, (rows, 6)),
        "attention_mask": np.concatenate([np.ones((rows, 6), np.int64), present], axis=1),
        "responses": rng.integers(97, 122, (rows, width)) * present,
        "response_mask": present,
        "token_level_scores": on_tokens,
        "rollout_log_probs": rollout,
        "old_log_probs": np.where(present, rollout + gaps, 0).astype(np.float32),
        "advantages": ((scores - 0.5) * 2)[:, None] * present,
        "uid": [f"{prefix}{first + group}" for group in groups],
        "index": [(first + group) % 5000 for group in groups],
        "seed": rng.integers(0, 2**63 - 1, rows).tolist(),
        "extra_info": [{"split": "train", "level": group % 5} for group in groups],
        "data_source": ["sums"] * rows,
        "prompt": [f"What is {(first + group) % 5000} + {group}?" for group in groups],
        "response": texts,
        "ground_truth": [str((first + group) % 5000 + group) for group in groups],
        "reward_parts": [{"acc": float(score), "format": 0.5} for score in scores],
        "reward_error": [error if (step * rows + row) % 5003 == 0 else None for row in range(rows)],
        "finish_reason": ["length" if length == width else "stop" for length in lengths],
        "policy_versions": [[[step - 1, int(length)]] for length in lengths],
    }


def _stages(folder: Path, step: int, begin: float) -> None:
    spans = []
    for name, seconds in STAGES.items():
        spans.append([name, round(begin, 3), seconds])
        begin += seconds
    append_line(folder / TIMELINE, {"step": step, "stages": spans})


def _vocabulary(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"token": pa.array([bytes([byte]) for byte in range(256)], pa.binary())}),
        folder / "vocabulary.parquet",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="synthetic")
    parser.add_argument("--lr", type=float, default=1e-6, help="a higher one learns faster")
    options = parser.parse_args()
    wanted = {name: getattr(options, name) for name in ("steps", "responses", "seed", "name", "lr")}
    path = make_run(options.folder, **wanted)
    print(
        json.dumps({"run": str(path), "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file())})
    )


if __name__ == "__main__":
    main()
