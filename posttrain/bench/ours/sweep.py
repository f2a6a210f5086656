"""One engine at many sizes, and the machine's own limits: `python -m posttrain.bench.ours.sweep JOB`."""

from __future__ import annotations

import time
from typing import Any

from posttrain.bench.ours.rollout import load
from posttrain.bench.peers.wire import serve
from posttrain.bench.workload import make_workload
from posttrain.trainer.constants_ppo import apply_environment

CACHE = 0.6  # of the device's memory


def start(job: dict[str, Any]):
    from posttrain.bench.machine import bandwidths, peak_flops
    from posttrain.models.loading import DTYPES
    from posttrain.rollout.base import Request, Sampling
    from posttrain.rollout.generate import advance

    engine, name = _drawn(job) if job["drawn"] else load(job)

    def machine() -> dict[str, Any]:
        where = job["device"]
        return {"peak_flops": peak_flops(DTYPES[job["dtype"]], device=where), "bandwidth": bandwidths(device=where)}

    def point(rows: int, tokens: int, seed: int, prefix: int | None) -> dict[str, Any]:
        """Seconds and tokens of `rows` responses; after a `prefix` they count from when all of them are known to have
        begun. An engine that runs ahead tells of its first round then (256 tokens at most), and has begun the next."""
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


def _drawn(job: dict[str, Any]) -> tuple[Any, str]:
    """As `load`, over random weights that are drawn here instead of being read."""
    import torch

    from posttrain.bench.presets import draw
    from posttrain.config.model import ModelConfig
    from posttrain.config.rollout import RolloutConfig
    from posttrain.models.loading import DTYPES, load_tokenizer, proved
    from posttrain.rollout.engines import build_engine

    torch.set_num_threads(job["threads"])
    module = proved(draw(job["model"], DTYPES[job["dtype"]], job["device"]).eval(), f"--model {job['model']}")
    memory = {"gpu_memory_utilization": CACHE} if job["device"] == "cuda" else {}  # there is no trainer beside it
    settings = RolloutConfig(name=job["engine"], max_num_seqs=job["slots"], **{**memory, **job["settings"]})
    return build_engine(settings, module, load_tokenizer(ModelConfig(path=job["model"])))


if __name__ == "__main__":
    apply_environment()
    serve(start)
