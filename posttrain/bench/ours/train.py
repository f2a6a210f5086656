"""The policy's update as a run makes it: `python -m posttrain.bench.ours.train JOB`; one update per request."""

from __future__ import annotations

from typing import Any

from posttrain.bench.peers.wire import serve, timed
from posttrain.trainer.constants_ppo import apply_environment


def start(job: dict[str, Any]):
    import numpy as np
    import torch

    from posttrain.config.actor import ActorConfig
    from posttrain.config.algorithm import RolloutCorrectionConfig
    from posttrain.config.model import ModelConfig
    from posttrain.config.optim import OptimConfig
    from posttrain.engine.fsdp import EngineSettings, FSDPEngine
    from posttrain.engine.packing import plan_passes
    from posttrain.models.loading import DTYPES, load_causal_lm
    from posttrain.models.lora import with_adapters
    from posttrain.rollout.base import Output
    from posttrain.rollout.generate import to_batch
    from posttrain.workers.actor.objective import ActorObjective

    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    config = ModelConfig(path=job["model"], lora_rank=job["lora_rank"], **job["settings"])
    module = load_causal_lm(config, dtype=DTYPES[job["dtype"]], device=device)
    if config.lora_rank:
        module = with_adapters(module, config)
    settings = EngineSettings(
        device=device,
        optim=OptimConfig(lr=1e-5, weight_decay=0.0),
        token_budget=job["budget"],
        gradient_checkpointing=job["checkpointing"],
    )
    engine = FSDPEngine(module, settings)
    outputs = [Output(row, ids, [-1.0] * len(ids), "length") for row, ids in enumerate(job["responses"])]
    batch = to_batch(job["prompts"], outputs, pad_token_id=0)
    uids = [str(row // job["n"]) for row in range(len(outputs))]
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    generator = torch.Generator().manual_seed(0)
    mask_BR = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.randn(len(outputs), 1, generator=generator) * mask_BR
    actor = ActorConfig(loss_agg_mode="seq-mean-token-mean")
    objective = ActorObjective(actor, RolloutCorrectionConfig(), float(mask_BR.shape[1]))
    passes = plan_passes(batch, engine.facts())
    computed = sum(unit.tokens for units in passes for unit in units)

    def update() -> None:
        prepared = objective.prepare(batch.select())
        engine.update(prepared, objective, passes=passes)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def run(request: dict[str, Any]) -> dict[str, Any]:
        seconds, _ = timed(update)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        return {"seconds": seconds, "computed": computed, "passes": len(passes), "peak_gib": peak}

    return {"token_budget": job["budget"], "trained": engine.facts().trained}, run


if __name__ == "__main__":
    apply_environment()
    serve(start)
