"""Six steps straight, and three + killed + three: bitwise equal with trainer.deterministic=true, and what it costs.

    python3 scripts/check_deterministic.py [--device cuda] [--model 0.1b] [--strategy megatron] [--json FILE]

Four runs of the same GRPO settings on random weights: six steps with trainer.deterministic=true, the same killed
(SIGKILL) in the update of step 5 with a checkpoint at 3, its resume to step 6, and six steps without the setting.
Weights, optimizer and metrics of the resumed run are compared with the first one's, and the first one's step times with
the last one's. Each run has a process of its own, forked after everything has been imported: start-up is paid once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FRAME, KILLED_IN = 3, 5  # tokens that the chat template puts around a prompt; the step that is killed
STEPS, SAVED = 6, 3


def main() -> int:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whoever looks for a device before a fork breaks it
    options = arguments()
    started = time.perf_counter()

    import posttrain.trainer.ppo.runner  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="posttrain-deterministic-") as folder:
        out, problems = Path(folder), []
        apart(make_model, options, out)
        apart(train, options, out, "straight", deterministic=True)
        if (code := apart(train, options, out, "killed", deterministic=True, killed=True)) != -signal.SIGKILL:
            problems.append(f"the run that was to be killed ended with {code}")
        apart(train, options, out, "killed", deterministic=True)
        apart(train, options, out, "plain", deterministic=False)
        problems += differences(out / "runs/check/straight", out / "runs/check/killed")
        found = {name: step_times(out / "runs/check" / name) for name in ("straight", "plain")}
        said = differences(out / "runs/check/straight", out / "runs/check/plain")
    report(options, found, problems, said, time.perf_counter() - started)
    return bool(problems)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", default="0.1b", help="a preset of the bench, or a model folder (0.1b)")
    parser.add_argument("--strategy", default="fsdp2", help="the train engine: fsdp2 or megatron (fsdp2)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, eight responses each (16)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a response (256)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write step times and differences here")
    return parser.parse_args()


def apart(what: Any, *args: Any, **kwargs: Any) -> int | None:
    """Call it in a process of its own; gives how that ended. One that fails ends this program too."""
    child = multiprocessing.get_context("fork").Process(target=_quietly, args=(what, args, kwargs))
    child.start()
    child.join()
    if child.exitcode and child.exitcode > 0:
        sys.exit(f"{what.__name__} {args[2:]} {kwargs} failed")
    return child.exitcode


def _quietly(what: Any, args: Any, kwargs: Any) -> None:
    sys.stdout = sys.stderr  # what a run says; the result alone goes to standard output
    what(*args, **kwargs)


def make_model(options: argparse.Namespace, out: Path) -> None:
    """Written on the device's own process: the parent must not touch it."""
    from posttrain.bench.workload import find_model

    (out / "model").write_text(str(find_model(options.model, options.device).folder))


def train(options: argparse.Namespace, out: Path, name: str, *, deterministic: bool, killed: bool = False) -> None:
    import posttrain
    from posttrain.trainer.constants_ppo import apply_environment
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    apply_environment()
    if killed:
        plain = RayPPOTrainer._update

        def update(self: RayPPOTrainer, batch: Any, step: int) -> dict[str, float]:
            if step == KILLED_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, batch, step)

        RayPPOTrainer._update = update
    draw = random.Random(0)
    rows = [
        {"prompt": text(draw, options.prompt_tokens - FRAME), "ground_truth": "", "data_source": "check"}
        for _ in range(options.prompts * STEPS)
    ]
    posttrain.train(settings(options, out, name, deterministic), data=rows, reward=score)


def text(draw: random.Random, size: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=size))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Has spread for random weights: the share of characters with an even code."""
    return sum(ord(char) % 2 == 0 for char in solution_str) / max(1, len(solution_str))


def settings(options: argparse.Namespace, out: Path, name: str, deterministic: bool) -> dict[str, Any]:
    return {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": (out / "model").read_text(),
        "actor_rollout_ref.model.dtype": "bfloat16" if options.device == "cuda" else "auto",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.prompts // 2 or 1,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.actor.strategy": options.strategy,
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": options.prompt_tokens,
        "data.max_response_length": options.tokens,
        "reward.num_workers": 1,
        "trainer.default_local_dir": str(out / "runs"),
        "trainer.project_name": "check",
        "trainer.experiment_name": name,
        "trainer.device": options.device,
        "trainer.deterministic": deterministic,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": SAVED,
        "trainer.max_ckpt_to_keep": 1,
        "trainer.export_hf": "last",
    }


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_times(run: Path) -> dict[str, list[float]]:
    """Seconds of every step, and of its generation and update."""
    names = ("timing_s/step", "timing_s/gen", "timing_s/update_actor")
    return {name: [line[name] for line in metrics_of(run) if name in line] for name in names}


def differences(one: Path, other: Path) -> list[str]:
    """What of weights, optimizer and metrics differs; nothing where the runs are bitwise equal."""
    import torch

    found, (left, right) = [], map(tensors_of, (one, other))
    differ = [name for name in left if name not in right or not torch.equal(left[name], right[name])]
    if differ or left.keys() != right.keys():
        found.append(f"{len(differ)} of {len(left)} tensors differ, {', '.join(differ[:3])}")
    kept = [
        [{k: v for k, v in line.items() if not k.startswith(("time", "timing_", "perf/"))} for line in metrics_of(run)]
        for run in (one, other)
    ]
    if [line["step"] for line in kept[0]] != [line["step"] for line in kept[1]]:
        found.append("other steps are in metrics.jsonl")
    for left_line, right_line in zip(*kept, strict=False):
        keys = sorted(key for key in left_line if left_line[key] != right_line.get(key))
        if keys:
            step = left_line["step"]
            found.append(f"metrics of step {step} differ: {', '.join(keys[:4])}")
            found.append(f"of its samples: {differing_columns(one, other, step)}")
            break
    return found


def differing_columns(one: Path, other: Path, step: int) -> str:
    """How many rows differ in each column of a step's samples: tokens, log-probs of rollout and trainer, scores. Which
    of them is the first to differ says where to look."""
    import pyarrow.parquet as pq

    left, right = (pq.read_table(run / "samples" / f"step_{step}.parquet") for run in (one, other))
    rows = {
        name: sum(a != b for a, b in zip(left[name].to_pylist(), right[name].to_pylist(), strict=True))
        for name in left.column_names
    }
    return (
        ", ".join(f"{name} in {count} of {len(left)} rows" for name, count in rows.items() if count) or "none differs"
    )


def tensors_of(run: Path) -> dict[str, Any]:
    import torch

    from posttrain.checkpoint import CheckpointManager

    manager = CheckpointManager(run / "checkpoints")
    newest = manager.newest()
    assert newest is not None and newest.name == f"global_step_{STEPS}", f"{run}: no checkpoint of step {STEPS}"
    into = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in manager.describe(newest, "actor").items()}
    manager.load_tensors(newest, "actor", into)
    return into


def report(options: argparse.Namespace, times: dict, problems: list[str], plain: list[str], seconds: float) -> None:
    print(
        f"{options.model} on {options.device}: {options.prompts} x 8 x {options.tokens} tokens, {seconds:.0f} s in all"
    )
    print(f"  {'seconds, median of steps 2 to 6':<34}{'step':>8}{'rollout':>9}{'update':>9}")
    rows = {"trainer.deterministic=true": "straight", "without it": "plain"}
    middle = {name: [statistics.median(column[1:]) for column in times[name].values()] for name in times}
    for words, name in rows.items():
        print(f"  {words:<34}" + "".join(f"{value:>9.3f}" for value in middle[name]))
    ratios = [one / other for one, other in zip(middle["straight"], middle["plain"], strict=True)]
    print(f"  {'times as long':<34}" + "".join(f"{ratio:>9.2f}" for ratio in ratios))
    print("  3 + killed + 3 = 6 bit for bit: " + ("no: " + "; ".join(problems) if problems else "yes"))
    print("  without it, against the first run: " + ("; ".join(plain) if plain else "equal too"))
    if options.json:
        found = {"times": times, "problems": problems, "without": plain, "seconds": seconds}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
