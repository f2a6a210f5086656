#!/usr/bin/env python3
"""The GRPO run of scripts/smollm_gsm8k.sh by TRL's GRPOTrainer: smollm_trl.py MODEL DATA OUT [--steps N] [--seconds S]

MODEL is the folder of the SFT model, DATA has train.parquet and test.parquet, OUT gets `curve.json` (written anew after
each step: seconds since training began, mean reward, stages) and `step_N/`, the weights after every --every steps and
at the end, for `posttrain eval`. The same prompts in the same order, reward, loss (mean over tokens), learning rate and
precision (float32 weights and moments, bfloat16 passes) as here; vLLM in the same process and Liger's kernels on CUDA.
What copying the weights aside takes is not counted. Needs trl beside posttrain; on CUDA liger-kernel and vllm too.
`smollm_trl.py --check` only says whether they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from needs import need
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from posttrain.bench.systems import VLLM_INSIDE
from posttrain.data.sampler import shuffled
from posttrain.rewards.scorers.gsm8k import score
from posttrain.tracking.safe_files import replace_file

LONGEST_PROMPT = 512


def right_answer(completions: list[Any], ground_truth: list[str], **columns: Any) -> list[float]:
    """posttrain's own reward, as TRL calls one."""
    pairs = zip(completions, ground_truth, strict=True)
    return [float(score(messages[0]["content"], truth)["score"]) for messages, truth in pairs]


def prompts(file: Path, seed: int) -> Any:
    """The rows in the order in which a run of posttrain with `trainer.seed` takes them."""
    from datasets import Dataset  # pyright: ignore

    rows = pq.read_table(file, columns=["prompt", "ground_truth"]).to_pylist()
    chosen = [rows[int(number)] for number in shuffled(len(rows), seed, 0)]
    return Dataset.from_list([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in chosen])


def in_bfloat16(folder: Path, out: Path) -> Path:
    """vLLM generates in the type that `config.json` names: a model saved in another one is written again."""
    if AutoConfig.from_pretrained(folder).dtype == torch.bfloat16:
        return folder
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    rows = options.prompts * options.n
    cuda = {
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": LONGEST_PROMPT + options.tokens,
        "vllm_importance_sampling_correction": False,
        "use_liger_kernel": True,
    }
    return {
        "per_device_train_batch_size": min(options.micro, rows),
        "gradient_accumulation_steps": max(1, rows // options.micro),
        "generation_batch_size": rows,
        "num_generations": options.n,
        "num_iterations": 1,
        "max_completion_length": options.tokens,
        "max_steps": options.steps,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over the batch's tokens
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": options.seed,
        **(cuda if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}),
        **dict(options.set),
    }


class Curve(TrainerCallback):
    """Takes the time at the end of each step and its reward when that is logged; ends the training after `seconds`."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.options, self.facts = options, facts
        self.steps: list[dict[str, float]] = []
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.started = self.aside = 0.0

    def clock(self) -> float:
        return time.perf_counter() - self.started - self.aside

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, number = self.clock(), state.global_step
        self.steps.append({"step": number, "seconds": seconds})
        last = number >= self.options.steps or seconds > self.options.seconds
        if last or number % self.options.every == 0:
            before = time.perf_counter()
            self.kept[number] = {name: value.to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
            self.aside += time.perf_counter() - before
        control.should_training_stop = control.should_training_stop or last

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "reward" not in logs:
            return
        line = self.steps[-1]
        line |= {"reward": logs["reward"], "length": logs.get("completions/mean_length")}
        print(f"step {line['step']}: {line['seconds']:.1f} s, reward {line['reward']:.4f}", flush=True)
        self.write()

    def write(self) -> None:
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        content = {**self.facts, "peak_gib": peak, "steps": self.steps}
        replace_file(self.options.out / "curve.json", (json.dumps(content, indent=1) + "\n").encode())


def look_for_peers() -> None:
    need("trl", "datasets", get=f"{sys.executable} -m pip install trl")
    if torch.cuda.is_available():
        need(
            "vllm",
            "liger_kernel",
            get=f"{sys.executable} -m pip install liger-kernel, and the vllm that this TRL takes",
        )


def main(options: argparse.Namespace) -> None:
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    began = time.perf_counter()
    os.environ |= VLLM_INSIDE
    options.out.mkdir(parents=True, exist_ok=True)
    folder = in_bfloat16(options.model, options.out / "start")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = settings_of(options)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=right_answer,
        args=GRPOConfig(output_dir=str(options.out), **settings),
        train_dataset=prompts(options.data / "train.parquet", options.seed),
        processing_class=tokenizer,
    )
    facts = {"name": f"TRL {version('trl')}", "load_s": time.perf_counter() - began, "settings": settings}
    print(f"loaded in {facts['load_s']:.1f} s", flush=True)
    curve = Curve(options, facts)
    trainer.add_callback(curve)
    trainer.train()
    curve.write()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for number, weights in curve.kept.items():
        model.load_state_dict(weights)
        model.save_pretrained(options.out / f"step_{number}")
        tokenizer.save_pretrained(options.out / f"step_{number}")
    print(f"{len(curve.steps)} steps in {curve.steps[-1]['seconds']:.1f} s", flush=True)


def setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1e9, help="of training; the step under way is finished")
    parser.add_argument("--every", type=int, default=20, help="steps between weights that are kept")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--micro", type=int, default=64, help="rows of one pass")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=JSON", help="of GRPOConfig")
    if sys.argv[1:] == ["--check"]:
        look_for_peers()
    else:
        given = parser.parse_args()
        look_for_peers()
        main(given)
