"""One engine at many sizes, and the machine's own limits: `python -m posttrain.bench.ours.sweep JOB`."""

from __future__ import annotations

from typing import Any

from posttrain.bench.ours.rollout import load
from posttrain.bench.peers.wire import serve, timed
from posttrain.bench.workload import make_workload
from posttrain.trainer.constants_ppo import apply_environment


def start(job: dict[str, Any]):
    from posttrain.bench.machine import bandwidths, peak_flops
    from posttrain.models.loading import DTYPES
    from posttrain.rollout.base import Sampling
    from posttrain.rollout.generate import generate

    engine, name = load(job)

    def machine() -> dict[str, Any]:
        where = job["device"]
        return {"peak_flops": peak_flops(DTYPES[job["dtype"]], device=where), "bandwidth": bandwidths(device=where)}

    def point(rows: int, tokens: int, seed: int) -> dict[str, Any]:
        work = make_workload(
            prompts=rows,
            n=1,
            prompt_tokens=job["prompt_tokens"],
            tokens=tokens,
            kind="fixed",
            vocab_size=job["vocab_size"],
        )
        sampling = [Sampling(max_tokens=tokens)] * rows
        seconds, outputs = timed(lambda: generate(engine, work.prompts, sampling, list(range(seed, seed + rows))))
        return {"seconds": seconds, "tokens": sum(len(output.token_ids) for output in outputs)}

    def run(request: dict[str, Any]) -> dict[str, Any]:
        return machine() if request.get("machine") else point(request["rows"], request["tokens"], request["seed"])

    return {"engine": name}, run


if __name__ == "__main__":
    apply_environment()
    serve(start)
