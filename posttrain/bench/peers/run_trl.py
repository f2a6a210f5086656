"""TRL's GRPOTrainer: one training per request, timed at the end of every step.

No KL, no reference, one optimizer step per batch, the original GRPO loss, float32 or bfloat16 weights as the job says,
and what only costs time switched off: gradient checkpointing, saving, reporting, progress bars. On CUDA vLLM
generates in this process, Liger's kernels train, and `weights` (of the job's settings) says in which type weights and
optimizer are: float32 computes under bfloat16 autocast.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from typing import Any

from wire import serve, share_of_letters  # pyright: ignore


def on_cuda(job: dict[str, Any], weights: str) -> dict[str, Any]:
    """Micro-batches of 32 rows, a generation per optimizer step, no second pass for importance weights."""
    rows = min(32, job["prompts"] * job["n"])
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": job["prompts"] * job["n"] // rows,
        "bf16": weights == "float32",
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": job["prompt_tokens"] + job["tokens"] + 8,
        "vllm_importance_sampling_correction": False,
        "use_liger_kernel": True,
    }


def peak() -> dict[str, float]:
    """The most memory that torch's tensors took on the device."""
    import torch

    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}


def settings_of(job: dict[str, Any], weights: str) -> dict[str, Any]:
    """The arguments of GRPOConfig, less those that differ between runs."""
    batch = job["prompts"] * job["n"]  # one optimizer step per generation, as the others do
    return {
        "per_device_train_batch_size": batch,
        "generation_batch_size": batch,
        "num_generations": job["n"],
        "num_iterations": 1,
        "max_completion_length": job["tokens"],
        "max_steps": job["steps"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": job["weight_decay"],
        "max_grad_norm": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "gradient_checkpointing": job["checkpointing"],
        "bf16": False,
        "fp16": False,
        "use_cpu": job["device"] == "cpu",
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **(on_cuda(job, weights) if job["device"] == "cuda" else {}),
        **{key: value for key, value in job["settings"].items() if key != "weights"},
    }


def start(job: dict[str, Any]):
    import torch
    from datasets import Dataset  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in job["texts"]])
    weights = job["settings"].get("weights", job["dtype"])
    settings = settings_of(job, weights)
    adapters: Any = None
    if job["lora_rank"]:
        from peft import LoraConfig

        rank = job["lora_rank"]
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.begins: list[float] = []
            self.ends: list[float] = [time.perf_counter()]
            self.lengths: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begins.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "completions/mean_length" in logs:
                self.lengths.append(float(logs["completions/mean_length"]))

    def run(request: dict[str, Any]) -> dict[str, Any]:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=weights)
        with tempfile.TemporaryDirectory(prefix="posttrain-bench-trl-") as folder:
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=share_of_letters,
                args=GRPOConfig(output_dir=folder, seed=request["seed"] + 1, **settings),
                train_dataset=rows,
                processing_class=tokenizer,
                peft_config=adapters,
            )
            clock = Clock()
            trainer.add_callback(clock)
            clock.ends = [time.perf_counter()]  # making the trainer, and vLLM in it, is no part of the first step
            trainer.train()
        inside = [end - begin for begin, end in zip(clock.begins, clock.ends[1:], strict=True)]
        wall = [end - before for before, end in pairwise(clock.ends)]
        return {"wall": wall, "inside": inside, "lengths": clock.lengths, "dtype": str(model.dtype), **peak()}

    return settings, run


if __name__ == "__main__":
    serve(start)
