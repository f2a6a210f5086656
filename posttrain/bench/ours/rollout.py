"""Our rollout engines, as a training run builds them: `python -m posttrain.bench.ours.rollout JOB`."""

from __future__ import annotations

from typing import Any

from posttrain.bench.peers.wire import rollout_answer, rows_of, sampled, serve, timed
from posttrain.trainer.constants_ppo import apply_environment


def load(job: dict[str, Any]) -> tuple[Any, str]:
    """(the engine `job["engine"]` over the job's model, its name and version)."""
    import torch

    from posttrain.config.model import ModelConfig
    from posttrain.config.rollout import RolloutConfig
    from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
    from posttrain.rollout.engines import build_engine

    torch.set_num_threads(job["threads"])
    model = ModelConfig(path=job["model"])
    module = load_causal_lm(model, dtype=DTYPES[job["dtype"]], device=torch.device(job["device"]))
    given = {"max_num_seqs": job.get("slots") or 1024, **job["settings"]}
    return build_engine(RolloutConfig(name=job["engine"], **given), module, load_tokenizer(model))


def start(job: dict[str, Any]):
    from posttrain.rollout.base import Sampling
    from posttrain.rollout.generate import generate

    engine, name = load(job)

    def batch(prompts: list[list[int]], samplings: list[Sampling], seed: int) -> list[Any]:
        engine.wake()
        outputs = generate(engine, prompts, samplings, [seed * 1_000_003 + row for row in range(len(samplings))])
        engine.sleep()
        return outputs

    def run(request: dict[str, Any]) -> dict[str, Any]:
        prompts, lengths = rows_of(job, request)
        samplings = [Sampling(max_tokens=n, temperature=job["temperature"]) for n in lengths]
        seconds, outputs = timed(lambda: batch(prompts, samplings, request["seed"]))
        tokens, log_probs = [output.token_ids for output in outputs], [output.log_probs for output in outputs]
        answer = rollout_answer(seconds, lengths, [*map(len, tokens)], [*map(len, log_probs)])
        return {**answer, **sampled(request, tokens, log_probs)}

    return {"engine": name}, run


if __name__ == "__main__":
    apply_environment()
    serve(start)
