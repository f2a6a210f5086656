"""A ragged batch, the actor's objective on it, and the gradient that an engine accumulates."""

from __future__ import annotations

import copy
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from posttrain.checkpoint.parts import Copying, HostCopies
from posttrain.config.root import ActorConfig, RolloutCorrectionConfig
from posttrain.engine.torch_engine import TorchEngine
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.workers.actor.dp_actor import ActorObjective

VOCABULARY = 261
KL, ENTROPY = 0.1, 0.3  # coefficients large enough to matter beside the policy loss
TEMPERATURE = 0.7  # other than 1, so that a pass that forgets it is seen


def ragged_batch(
    rows: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    prompts: int | None = None,
    alike: bool = False,
) -> DataProto:
    """Rows with responses of 1 to 12 tokens, a masked span in some, random everything else.

    Every row has a prompt of its own of 2 to 9 tokens; with `prompts`, that many longer ones are shared by the rows.
    With `alike`, responses are equal, or begin alike, or one is the beginning of another.
    """
    rng = np.random.default_rng(seed)
    low, high = (2, 10) if prompts is None else (15, 30)
    texts = [rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist() for _ in range(prompts or rows)]
    prompt_ids = [texts[row * len(texts) // rows] for row in range(rows)]
    responses = [rng.integers(0, VOCABULARY, rng.integers(1, 13)).tolist() for _ in range(rows)]
    if alike:
        whole = rng.integers(0, VOCABULARY, 12).tolist()
        responses = [[*whole[: len(ids) - row % 2], *ids[len(ids) - row % 2 :]] for row, ids in enumerate(responses)]
    outputs = [Output(i, ids, rng.normal(-3, 1, len(ids)).tolist(), "stop") for i, ids in enumerate(responses)]
    batch = to_batch(prompt_ids, outputs, pad_token_id=0)
    batch.non_tensor_batch["uid"] = np.array([str(row * len(texts) // rows) for row in range(rows)], dtype=object)
    mask = batch.batch["response_mask"]
    for row in range(0, rows, 3):
        mask[row, 1:2] = 0
    shape = mask.shape
    batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"].to(dtype)
    batch.batch["advantages"] = torch.from_numpy(rng.normal(size=shape)).to(dtype) * mask
    batch.batch["old_log_probs"] = torch.from_numpy(rng.normal(-5, 0.7, size=shape)).to(dtype) * mask
    batch.batch["ref_log_prob"] = torch.from_numpy(rng.normal(-5, 0.7, size=shape)).to(dtype) * mask
    return batch


def objective(**actor) -> ActorObjective:
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=KL, entropy_coeff=ENTROPY, **actor)
    return ActorObjective(config, RolloutCorrectionConfig(), loss_scale_factor=12.0)


def gradient(engine: TorchEngine, batch: DataProto, loss: ActorObjective) -> torch.Tensor:
    """The flat gradient of the whole mini-batch, as the engine accumulates it."""
    assert engine.optimizer is not None
    engine.optimizer.adam.zero_grad(set_to_none=True)
    assert engine.runner.gradients(loss.prepare(copy.copy(batch).select()), loss, TEMPERATURE)
    return torch.cat([m.grad.flatten() for m in engine.optimizer.masters])  # pyright: ignore


class HeldCopies:
    """Inside, the copy of a save begins when it is waited for, or at the end: what forgets to wait spoils it."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies, self.gates, self._stack = copies, [], ExitStack()

    def __enter__(self) -> HeldCopies:
        run, gates = Copying.run, self.gates

        def begun(copying: Copying, *given: Any) -> None:
            copying.gate = threading.Event()  # pyright: ignore
            gates.append(copying.gate)  # pyright: ignore
            init(copying, *given)

        def held(copying: Copying, folder: Path) -> None:
            assert copying.gate.wait(60)  # pyright: ignore
            run(copying, folder)

        class OpensGates(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                for gate in gates:
                    gate.set()
                return super().wait(timeout)

        init, self.copies.is_idle = Copying.__init__, OpensGates()
        self.copies.is_idle.set()
        self._stack.enter_context(mock.patch.object(Copying, "__init__", begun))
        self._stack.enter_context(mock.patch.object(Copying, "run", held))
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.gates:
            gate.set()
        self.copies.is_idle.wait()
        self._stack.close()
