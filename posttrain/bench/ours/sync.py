"""New weights for our rollout engine, as after an update: `python -m posttrain.bench.ours.sync JOB`.

The time runs until the engine has scored four tokens with them: one that only notes that weights are new must read them
within it.
"""

from __future__ import annotations

from typing import Any

from posttrain.bench.peers.wire import serve, timed
from posttrain.trainer.constants_ppo import apply_environment


def start(job: dict[str, Any]):
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
        seconds, _ = timed(lambda: hand_over(request["seed"] + 1))
        return {"seconds": seconds, "bytes": size, "moved": 0 if engine.shares_weights else size}

    return {"engine": name, "share": share}, run


if __name__ == "__main__":
    apply_environment()
    serve(start)
