"""Our rollout engines, as a run builds them: `python -m posttrain.bench.ours.engines JOB rollout|sweep|sync|truth`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from posttrain.bench.peers.wire import get_rows, pick_samples, rollout_answer, serve, time_call
from posttrain.bench.workload import make_workload
from posttrain.trainer.constants_ppo import apply_environment

CACHE = 0.6  # share of the device's memory in a sweep, where no trainer needs the rest


def load(job: dict[str, Any]) -> tuple[Any, str]:
    """(the engine `job["engine"]` over the job's model, its name and version)."""
    import torch

    from posttrain.bench.workload import draw
    from posttrain.config.model import ModelConfig
    from posttrain.config.rollout import RolloutConfig
    from posttrain.models.loading import DTYPES, fuse_and_prove, load_causal_lm, load_tokenizer
    from posttrain.rollout.engines import build_engine

    torch.set_num_threads(job["threads"])
    model, dtype, memory = ModelConfig(path=job["model"]), DTYPES[job["dtype"]], {}
    if job.get("drawn"):  # in a sweep presets have no weights on disk: drawing them here is faster than reading them
        module = fuse_and_prove(draw(job["model"], dtype, job["device"]).eval(), f"--model {job['model']}")
        memory = {"gpu_memory_utilization": CACHE} if job["device"] == "cuda" else {}
    else:
        module = load_causal_lm(model, dtype=dtype, device=torch.device(job["device"]))
    given = {"max_num_seqs": job.get("slots") or 1024, **memory, **job["settings"]}
    return build_engine(RolloutConfig(name=job["engine"], **given), module, load_tokenizer(model))


def rollout(job: dict[str, Any]):
    from posttrain.rollout.base import Sampling
    from posttrain.rollout.generate import generate

    engine, name = load(job)

    def batch(prompts: list[list[int]], samplings: list[Sampling], seed: int) -> list[Any]:
        engine.wake()  # inside the timed part
        outputs = generate(engine, prompts, samplings, [seed * 1_000_003 + row for row in range(len(samplings))])
        engine.sleep()
        return outputs

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = get_rows(job, request)
        samplings = [Sampling(max_tokens=n, temperature=job["temperature"]) for n in lengths]
        seconds, outputs = time_call(lambda: batch(prompts, samplings, request["seed"]))
        tokens, log_probs = [output.token_ids for output in outputs], [output.log_probs for output in outputs]
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        return {**answer, **pick_samples(request, tokens, log_probs)}

    return {"engine": name}, run


def sweep(job: dict[str, Any]):
    """One engine at many sizes, and the machine's own limits."""
    from posttrain.bench.device import bandwidths, peak_flops
    from posttrain.models.loading import DTYPES
    from posttrain.rollout.base import Request, Sampling
    from posttrain.rollout.generate import advance

    engine, name = load(job)

    def machine() -> dict[str, Any]:
        where = job["device"]
        return {"peak_flops": peak_flops(DTYPES[job["dtype"]], device=where), "bandwidth": bandwidths(device=where)}

    def point(rows: int, tokens: int, seed: int, prefix: int | None) -> dict[str, Any]:
        # With a `prefix` only tokens after the moment at which all rows are known to have begun are timed. An engine
        # that runs ahead reports its first round then (256 tokens at most), and has already begun the next.
        prompt = prefix or job["prompt_tokens"]
        work = make_workload(
            prompts=rows, n=1, prompt_tokens=prompt, tokens=tokens, kind="fixed", vocab_size=job["vocab_size"]
        )
        before, started, made = 0, time.perf_counter(), 0
        for row, ids in enumerate(work.prompts):
            engine.submit(Request(row, ids, Sampling(max_tokens=tokens), seed + row))
        if prefix:
            made = sum(
                len(output.token_ids) for output in advance(engine, until=lambda: engine.running_tokens() >= rows)
            )
            before, started = made + engine.running_tokens(), time.perf_counter()
        while engine.has_work():
            made += sum(len(output.token_ids) for output in advance(engine))
        seconds = time.perf_counter() - started
        if made != rows * tokens:
            raise RuntimeError(f"{made} tokens were made instead of {rows * tokens}")
        if made == before:
            raise RuntimeError(f"all {tokens} tokens of a row were made before one was known: give a longer --tail")
        return {"seconds": seconds, "tokens": made - before}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("machine"):
            return machine()
        return point(request["rows"], request["tokens"], request["seed"], request["prefix"])

    return {"engine": name}, run


def sync(job: dict[str, Any]):
    """New weights, as after an update, until the engine has scored four tokens with them."""
    # Scoring is timed too: an engine that only notes that weights are new must read them within the time.
    import torch

    from posttrain.config.model import ModelConfig
    from posttrain.config.rollout import RolloutConfig
    from posttrain.models.loading import DTYPES, load_causal_lm
    from posttrain.rollout.native.build import build_native

    torch.set_num_threads(job["threads"])
    device, share = torch.device(job["device"]), job["settings"].get("share", True)
    module = load_causal_lm(ModelConfig(path=job["model"]), dtype=DTYPES[job["dtype"]], device=device)
    engine, name = build_native(module, RolloutConfig(), decode=None, device=device, share=share)
    size = sum(weight.nbytes for weight in module.parameters())

    def hand_over(version: int) -> None:
        engine.load_weights(() if engine.shares_weights else module.state_dict().items(), version)
        engine.score([[1, 2, 3, 4]])

    def run(request: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            next(module.parameters()).mul_(1.0)  # the weights are new
        seconds, _ = time_call(lambda: hand_over(request["seed"] + 1))
        return {"seconds": seconds, "bytes": size, "moved": 0 if engine.shares_weights else size}

    return {"engine": name, "share": share}, run


Rows = Sequence[Sequence[float]]


def distance(given: Rows, truth: Rows) -> dict[str, float]:
    """Mean and greatest difference over all tokens, and the KL divergence of `truth` from `given`, in nats."""
    import torch

    # r - 1 - log r, r the probability in truth over the given one, has the KL divergence as its mean, and no term of it
    # is negative: a few thousand tokens are enough.
    right, found = (torch.tensor([*chain.from_iterable(rows)], dtype=torch.float64) for rows in (truth, given))
    logs = right - found
    off, kl = logs.abs(), torch.expm1(logs) - logs
    return {"mean": off.mean().item(), "max": off.max().item(), "kl": kl.mean().item(), "tokens": len(logs)}


def float32(job: dict[str, Any]):
    """What sampled tokens are worth to the same model in float32, and to our trainer; a request has the tokens and
    log-probs of one system."""
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

    def score_rows(model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
        found = []  # row by row: nothing is padded, and the logits of only one row are in memory
        with torch.inference_mode():
            for prompt, answer in zip(prompts, tokens, strict=True):
                ids = torch.tensor([[*prompt, *answer]], device=device)
                logits = model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
                chosen = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])
                found.append(chosen[:, 0].tolist())
        return found

    def score_with_trainer(prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
        outputs = [Output(row, ids, [0.0] * len(ids), "length") for row, ids in enumerate(tokens)]
        log_probs_BR = trainer.log_probs(to_batch(prompts, outputs, pad_token_id=0))["log_probs"]
        return [row[: len(ids)].tolist() for row, ids in zip(log_probs_BR, tokens, strict=True)]

    # The truth is transformers' own forward pass in float32; TF32, which has 10 bits, is off.
    truth, plain = transformers(torch.float32, "eager"), transformers(DTYPES[job["dtype"]])
    module = load_causal_lm(ModelConfig(path=job["model"]), dtype=DTYPES[job["dtype"]], device=device)
    trainer = TorchEngine(module, EngineSettings(device=device))

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, tokens, given = request["prompts"], request["tokens"], request["log_probs"]
        right = score_rows(truth, prompts, tokens)
        ours, theirs = score_with_trainer(prompts, tokens), score_rows(plain, prompts, tokens)
        return {
            "rollout": distance(given, right),
            "trainer": distance(ours, right),
            "transformers": distance(theirs, right),
            "rollout_trainer": distance(given, ours),
        }

    return {"truth": "transformers, float32, no TF32", "packed": trainer.facts().packed}, run


if __name__ == "__main__":
    apply_environment()
    serve({"rollout": rollout, "sweep": sweep, "sync": sync, "truth": float32}[sys.argv[2]])
