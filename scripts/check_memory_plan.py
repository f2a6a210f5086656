"""Planned and measured peak memory of whole GRPO steps, by stage: python3 scripts/check_memory_plan.py [--json FILE]

Five configurations with random weights of the bench's shapes, two steps each, through the trainer itself: what
`posttrain plan` says of a configuration beside what torch allocated on the device in each stage. --only A,B takes some
of them. --device cpu --only 1m tries it where there is no GPU: measured there is all that the process holds, torch
itself among it.

Weights are drawn on the device and never written, so that 7B does not wait for a disk. Each configuration has a process
of its own, forked after everything has been imported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT, FRAME = 128, 3  # tokens of a prompt, and those that the chat template puts around its text
MEASURED = {"load": ("load",), "generate": ("gen",), "log-probs": ("old_log_prob",), "update": ("update_actor",)}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model of the bench, its settings, and how many prompts x 8 responses of how many tokens a step has."""

    model: str
    prompts: int = 16
    tokens: int = 512
    lora_rank: int = 0
    checkpointing: bool = False


CASES = {
    "0.5b": Case("0.5b"),
    "0.5b-lora": Case("0.5b", lora_rank=32),
    "1.5b": Case("1.5b"),
    "1.5b-checkpointing": Case("1.5b", checkpointing=True),
    "7b-lora": Case("7b", prompts=8, lora_rank=32),
}
SMALL = {"1m": Case("1m", prompts=2, tokens=32), "1m-lora": Case("1m", prompts=2, tokens=32, lora_rank=8)}


def main() -> int:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whoever looks for a device before a fork breaks it
    options = arguments()
    import_everything()
    found = {}
    for name in options.only.split(",") if options.only else CASES:
        found[name] = measured_apart(name, options.device)
        print(table(name, found[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    return 0 if all("stages" in one for one in found.values()) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join((*CASES, *SMALL))} (the first five)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here, after each configuration")
    options = parser.parse_args()
    if unknown := set(options.only.split(",") if options.only else ()) - {*CASES, *SMALL}:
        parser.error(f"--only: no {', '.join(sorted(unknown))}")
    return options


def import_everything() -> None:
    """What takes seconds, once for all configurations; nothing here may touch the device before the fork."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # pyright: ignore

    import posttrain.planning.rl
    import posttrain.trainer.ppo.runner  # noqa: F401


def measured_apart(name: str, device: str) -> dict[str, Any]:
    """`measure` in a process of its own; what went wrong there is its last line."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(name, device, there))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return {"error": f"its process ended with {child.exitcode}"}
    finally:
        child.join()


def _answer(name: str, device: str, where: Any) -> None:
    sys.stdout = sys.stderr  # what the run says; tables alone go to standard output
    try:
        where.send(measure((CASES | SMALL)[name], device))
    except BaseException as error:
        traceback.print_exc()
        where.send({"error": str(error).splitlines()[0] if str(error) else type(error).__name__})


def measure(case: Case, device: str) -> dict[str, Any]:
    """GiB by stage, planned and measured, and the parts of the plan."""
    import torch

    from posttrain.bench.workload import find_shape
    from posttrain.config import load_config
    from posttrain.controller.pool import StagePeaks
    from posttrain.planning.memory_plan import find_device
    from posttrain.planning.rl import RLPlanner
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer
    from posttrain.trainer.ppo.runner import opened_training

    class WithoutCheckpoints(RayPPOTrainer):
        def _save_checkpoint(self) -> Path:
            return self.run.checkpoints

    started = time.perf_counter()
    if device == "cuda":
        torch.cuda.init()
    with tempfile.TemporaryDirectory(prefix="posttrain-memory-") as folder:
        resolved = load_config(settings(case, find_shape(case.model), folder, device))
        rows = [
            {"prompt": f"{row:04d}".ljust(PROMPT - FRAME, "x"), "ground_truth": "", "data_source": "memory"}
            for row in range(2 * case.prompts)
        ]
        random_weights(device)
        peaks = StagePeaks()
        peaks.begin()
        with opened_training(resolved, data=rows, reward=any_score, trainer_class=WithoutCheckpoints) as trainer:
            peaks.end("load")
            plan = RLPlanner().plan(trainer.config, find_device(trainer.config))
            result = trainer.fit()
    lines = [peaks.take(), *result.metrics]
    stages = {}
    for stage, names in MEASURED.items():
        most = max((line.get(f"perf/memory_gb/{name}", 0.0) for line in lines for name in names), default=0.0)
        planned = max(plan.peak(own) for own in ((stage, "step") if stage == "update" else (stage,)))
        stages[stage] = {
            "planned": planned / GIB,
            "measured": most * 1e9 / GIB,
            "parts": {part: size / GIB for part, size in plan.stages[stage].items() if size},
        }
    times = [round(line["timing_s/step"], 2) for line in result.metrics]
    return {"device": plan.device.words, "stages": stages, "steps_s": times, "s": time.perf_counter() - started}


def any_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return (len(solution_str) % 7) / 7


def settings(case: Case, model: Any, folder: str, device: str) -> dict[str, Any]:
    return {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(model.folder),
        "actor_rollout_ref.model.dtype": model.dtype,
        "actor_rollout_ref.model.lora_rank": case.lora_rank,
        "actor_rollout_ref.model.enable_gradient_checkpointing": case.checkpointing,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": case.prompts,
        "actor_rollout_ref.actor.old_log_probs": "trainer",
        "data.train_batch_size": case.prompts,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": case.tokens,
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": f"{folder}/runs",
        "trainer.device": device,
        "trainer.rollout_mismatch_tol": 1.0,  # only memory is looked at
        "tracking.samples_freq": 0,
    }


def random_weights(device: str) -> None:
    """From now on, in this process, a model's weights are drawn on the device instead of read."""
    from transformers import AutoModelForCausalLM

    from posttrain.bench.workload import draw
    from posttrain.models import loading

    def drawn(source: str, *, dtype: Any, **others: Any) -> tuple[Any, dict[str, Any]]:
        model = draw(source, dtype, device)
        return model, {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}

    loading.not_finite = lambda named: []  # a run looks for NaN before weights are on the device
    AutoModelForCausalLM.from_pretrained = drawn  # pyright: ignore


def table(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name}: {found['error']}"
    lines = [f"{name}, {found['device']}: steps of {found['steps_s']} s, {found['s']:.0f} s in all"]
    lines += [f"  {'GiB':<10}{'planned':>9}{'measured':>10}{'off by':>9}"]
    for stage, one in found["stages"].items():
        off = one["planned"] / one["measured"] - 1 if one["measured"] else float("nan")
        lines.append(f"  {stage:<10}{one['planned']:>9.2f}{one['measured']:>10.2f}{off:>+9.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
