"""The prose of `posttrain explain`, from the Markdown files in `prose/`: a `##` heading is the name of a page.

`WORDS` are words of the field and of the lines that a run prints; `TOPICS` have no algorithm file of their own; a page
says what the thing means, what to make of it, where it is set and which page says more.
"""

from __future__ import annotations

import re
from pathlib import Path


def _read(file: str) -> dict[str, str]:
    text = (Path(__file__).parent / "prose" / file).read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return {name: body.strip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}


WORDS, TOPICS, METRICS = _read("words.md"), _read("topics.md"), _read("metrics.md")
SUPERVISED_TOPICS, SUPERVISED_METRICS = _read("supervised.md"), _read("supervised_metrics.md")

# Other names of these and other pages; a blank also matches `_` and `-`, and a plural its singular.
SPELLINGS: dict[str, str] = {
    "adv": "advantage",
    "kl divergence": "kl",
    "kl loss": "kl_loss",
    "clipping": "clip",
    "clip ratio": "clip",
    "clip range": "clip",
    "ref": "reference",
    "ref policy": "reference",
    "reference model": "reference",
    "reference policy": "reference",
    "ckpt": "checkpoint",
    "saved": "checkpoint",
    "best checkpoint": "checkpoint",
    "batch": "batch size",
    "train batch size": "batch size",
    "minibatch": "mini-batch",
    "mini batch size": "mini-batch",
    "microbatch": "micro-batch",
    "micro batch size": "micro-batch",
    "gen": "rollout",
    "generation": "rollout",
    "group size": "rollout.n",
    "grad norm": "gradient norm",
    "grad clip": "gradient norm",
    "lr": "learning rate",
    "warmup": "warm-up",
    "adam": "optimizer",
    "adamw": "optimizer",
    "optimizer step": "optimizer",
    "reference answer": "ground truth",
    "tokens per second": "tok/s",
    "throughput": "tok/s",
    "response length": "response_length",
    "completion": "response",
    "completion length": "response_length",
    "logprob": "log-prob",
    "log probability": "log-prob",
    "old log-prob": "log-prob",
    "old log-probs": "log-prob",
    "sync": "weight sync",
    "value function": "value",
    "value model": "critic",
    "score": "scores",
    "val": "validation",
    "eval": "validation",
    "trajectory": "rollout",
    "episode": "rollout",
    "importance weight": "rollout_correction",
    "importance sampling": "rollout_correction",
    "importance ratio": "ratio",
    "discount": "return",
    "gamma": "return",
    "random seed": "seed",
    "oom": "out of memory",
    "dataset": "prompt",
    "rank": "worker",
    "gpu": "worker",
    "ray": "worker",
    "vllm": "rollout",
    "sglang": "rollout",
    "bf16": "dtype",
    "bfloat16": "dtype",
    "mean@": "validation",
    "pass@": "pass@k",
    "maj@": "maj@k",
}
