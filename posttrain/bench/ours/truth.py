"""What sampled tokens are worth to the same model in float32, and to our trainer: `python -m posttrain.bench.ours.truth
JOB`; one request per system, whose tokens and log-probs it holds.

The truth is transformers' own forward pass in float32, without TF32. The KL divergence from the distribution that was
sampled from is the mean of r - 1 - log r, r the probability in truth over the given one: no term of it is negative, so
that a few thousand tokens are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from posttrain.bench.peers.wire import serve
from posttrain.trainer.constants_ppo import apply_environment

Rows = Sequence[Sequence[float]]


def distance(given: Rows, truth: Rows) -> dict[str, float]:
    """Mean and greatest difference over all tokens, and the KL divergence of `truth` from `given`, in nats."""
    import torch

    right, found = (torch.tensor([*chain.from_iterable(rows)], dtype=torch.float64) for rows in (truth, given))
    logs = right - found
    off, kl = logs.abs(), torch.expm1(logs) - logs
    return {"mean": off.mean().item(), "max": off.max().item(), "kl": kl.mean().item(), "tokens": len(logs)}


def start(job: dict[str, Any]):
    import torch
    from transformers import AutoModelForCausalLM

    from posttrain.config.model import ModelConfig
    from posttrain.engine.base import EngineSettings
    from posttrain.engine.torch_engine import TorchEngine
    from posttrain.models.loading import DTYPES, load_causal_lm
    from posttrain.rollout.base import Output
    from posttrain.rollout.generate import to_batch

    torch.set_num_threads(job["threads"])
    torch.set_float32_matmul_precision("highest")
    device = torch.device(job["device"])

    def transformers(dtype: torch.dtype, attention: str = "sdpa") -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation=attention)
        return model.eval().to(device)

    def scored(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
        """Row by row, so that nothing is padded and the logits of one row are held."""
        found = []
        with torch.inference_mode():
            for prompt, answer in zip(prompts, tokens, strict=True):
                ids = torch.tensor([[*prompt, *answer]], device=device)
                logits = model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
                chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])
                found.append(chosen[:, 0].tolist())
        return found

    def trained(prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
        outputs = [Output(row, ids, [0.0] * len(ids), "length") for row, ids in enumerate(tokens)]
        log_probs_BR = trainer.log_probs(to_batch(prompts, outputs, pad_token_id=0))["log_probs"]
        return [row[: len(ids)].tolist() for row, ids in zip(log_probs_BR, tokens, strict=True)]

    truth, plain = transformers(torch.float32, "eager"), transformers(DTYPES[job["dtype"]])
    module = load_causal_lm(ModelConfig(path=job["model"]), dtype=DTYPES[job["dtype"]], device=device)
    trainer = TorchEngine(module, EngineSettings(device=device))

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, tokens, given = request["prompts"], request["tokens"], request["log_probs"]
        right = scored(truth, prompts, tokens)
        ours, theirs = trained(prompts, tokens), scored(plain, prompts, tokens)
        return {
            "rollout": distance(given, right),
            "trainer": distance(ours, right),
            "transformers": distance(theirs, right),
            "rollout_trainer": distance(given, ours),
        }

    return {"truth": "transformers, float32, no TF32", "packed": trainer.packed}, run


if __name__ == "__main__":
    apply_environment()
    serve(start)
