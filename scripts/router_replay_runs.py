#!/usr/bin/env python3
"""A small mixture of experts on the embedded sums, trained by GRPO with and without router replay.

    python scripts/router_replay_runs.py OUT                  # three seeds each, a table at the end
    python scripts/router_replay_runs.py OUT --steps 20 --seeds 1

The mixture (8 experts, 2 a token) is fine-tuned until it solves half of the withheld sums, like the embedded model. Its
rollout rounds to fp8 (emulated on a CPU), so that some routes differ from the trainer's: in float32 hardly any would.
Both kinds of runs record routes; importance weights correct for the rollout's rounding in both. Printed are, by run,
the validation score and the mean reward over the last tenth of the steps, and means over all steps of the share of
changed routes, the mismatch KL and the mean difference of log-probs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import posttrain
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.embedded import byte_tokenizer
from posttrain.models.loading import fuse_and_prove
from posttrain.trainer.embedded import _pair, ensure_embedded, fit_pairs, greedy_accuracy

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": True,
    "initializer_range": 0.1,
}  # fmt: skip
WITHHELD, UNTIL, MOST_STEPS, CHECK_EVERY = 200, 0.5, 600, 4
MODES = ("disabled", "R3")


def make_mixture(folder: Path, sums: Path) -> Path:
    """The mixture after SFT on the sums, made once."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (folder / "config.json").exists():
        return folder
    tokenizer: Any = byte_tokenizer()
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **ends, **SHAPE)).eval()
    model = fuse_and_prove(model, "the mixture")
    pairs = [_pair(tokenizer, row) for row in json.loads((sums / "train.json").read_text())]
    optim = OptimConfig(lr=3e-3, betas=[0.9, 0.95], lr_warmup_steps=20)
    settings = EngineSettings(device=torch.device("cpu"), optim=optim, total_steps=MOST_STEPS, token_budget=8192)
    right = 0.0

    def is_enough(step: int, loss: float) -> bool:
        nonlocal right
        if (step + 1) % CHECK_EVERY == 0:
            right = greedy_accuracy(model, pairs[:WITHHELD], tokenizer.pad_token_id)
            print(f"SFT step {step + 1}: loss {loss:.3f}, {right:.0%} of withheld sums right", flush=True)
        return right >= UNTIL

    how = {"steps": MOST_STEPS, "batch_size": 256, "pad_token_id": tokenizer.pad_token_id, "seed": 0}
    fit_pairs(TorchEngine(model, settings), pairs[WITHHELD:], on_step=is_enough, **how)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, sums: Path, out: Path, mode: str, seed: int, steps: int) -> dict[str, float]:
    name = f"{mode}_{seed}"
    settings = {
        "preset": "embedded",
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": str(sums / "train.json"),
        "data.val_files": str(sums / "test.json"),
        "data.train_batch_size": 50,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 25,
        "actor_rollout_ref.actor.router_replay.mode": mode,
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
        "actor_rollout_ref.rollout.quantization": "fp8",
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        "trainer.seed": seed,
        "trainer.device": "cpu",
        "trainer.export_hf": "none",
        "trainer.default_local_dir": str(out),
        "trainer.project_name": "router_replay",
        "trainer.experiment_name": name,
    }
    result = posttrain.train(settings)
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "actor/route_changes" in line]

    def mean(key: str, part: list[dict[str, float]]) -> float:
        return sum(line[key] for line in part) / len(part)

    scores = {key: value for key, value in lines[-1].items() if key.startswith("val/") and "mean@" in key}
    return {
        "validation": next(iter(scores.values())),
        "reward, end": mean("reward_mean", taken[-max(1, len(taken) // 10) :]),
        "route changes": mean("actor/route_changes", taken),
        "mismatch KL": mean("mismatch/k3_kl", taken),
        "log-prob difference": mean("mismatch/logp_mean", taken),
        "expert load, end": mean("actor/expert_load_max", taken[-max(1, len(taken) // 10) :]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    sums = ensure_embedded(print, model=False)
    model = make_mixture(options.out / "mixture", sums)
    found = {
        (mode, seed): train(model, sums, options.out, mode, seed, options.steps)
        for seed in range(1, options.seeds + 1)
        for mode in MODES
    }
    columns = list(next(iter(found.values())))
    print("| mode | seed | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for (mode, seed), values in sorted(found.items()):
        print(f"| `{mode}` | {seed} | " + " | ".join(f"{values[name]:.3g}" for name in columns) + " |")


if __name__ == "__main__":
    main()
