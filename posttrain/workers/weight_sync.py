"""The proof of a weight sync: the rollout engine must score fixed tokens as the trainer does (`WeightProbe`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.engine.base import TrainEngine
from posttrain.models.loading import few, not_finite
from posttrain.models.proof import beyond_rounding
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, RolloutEngine
from posttrain.rollout.generate import to_batch
from posttrain.rollout.weight_buckets import SyncError

ROWS, LENGTH = 4, 12  # enough to see a wrong tensor, too little to be felt


def compare_scores(
    ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, lost: Callable[[], list[str]]
) -> dict[str, float]:
    """`sync/probe_max` of the trainer's scores and an engine's; past the tolerance of the type it is an error. `lost`
    names weights of the trainer that are not finite."""
    if differ := beyond_rounding(ours, theirs, dtype):
        # NaN differs from everything: tell an update that broke the weights from a sync that lost some.
        if not bool(torch.isfinite(ours).all()):
            names = lost()
            where = f" (NaN or infinite: {few(names)})" if names else ""
            raise SyncError(
                f"the update left weights with which the trainer itself computes no numbers{where}: it was too "
                "large. Lower actor_rollout_ref.actor.optim.lr, and continue from a checkpoint before it"
            )
        raise SyncError(
            f"after the weight sync the rollout engine's log-probs differ from the trainer's {differ}: the engine "
            "does not compute with the weights it was given"
        )
    # Below the tolerance it is a metric, so that a slow drift shows before it stops a run.
    return {"sync/probe_max": float((ours - theirs).abs().max())}


class WeightProbe:
    """Fixed token rows that trainer and rollout engine score after each sync."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        # A generator of its own: drawing from the global one would change the run.
        generator = torch.Generator().manual_seed(20240203)
        self.rows = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator).tolist()
        self.pad = tokenizer.pad_token_id
        self.batch = _rows_batch([row[:1] for row in self.rows], [row[1:] for row in self.rows], self.pad)

    def compare(self, trainer: TrainEngine, rollout: RolloutEngine | None) -> dict[str, float]:
        """`sync/probe_max`: the largest difference in log-probs; past the tolerance of the type the run must stop. A
        rank without a rollout engine only looks for weights that are not finite."""
        theirs = self.score_with_rollout(rollout) if rollout is not None else None
        ours = self.score_with_trainer(trainer)
        facts = trainer.facts()
        dtype = (rollout and rollout.rounding) or facts.rounding or facts.dtype
        theirs = ours if theirs is None else theirs
        return compare_scores(ours, theirs, dtype, lambda: not_finite(trainer.export_weights()))

    def score_with_trainer(self, engine: TrainEngine) -> torch.Tensor:
        """Log-probs of the fixed rows; all ranks compute them."""
        return engine.log_probs(self.batch)["log_probs"]

    def score_with_rollout(self, engine: RolloutEngine) -> torch.Tensor:
        return torch.stack(engine.score(self.rows))

    def dry_run(self, engine: TrainEngine, actor: Any, lengths: Sequence[int], prompt_length: int) -> None:
        prompts = [[0] * min(prompt_length, length - 1) for length in lengths]
        responses = [[0] * (length - len(prompt)) for length, prompt in zip(lengths, prompts, strict=True)]
        batch = _rows_batch(prompts, responses, self.pad)
        zeros = torch.zeros_like(batch.batch["rollout_log_probs"])
        batch.union(DataProto.from_dict(tensors={"advantages": zeros}))
        prepared = actor.objective.prepare(batch)
        engine.trial_pass(prepared, actor.objective)


def _rows_batch(prompts: list[list[int]], responses: list[list[int]], pad: int) -> DataProto:
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(responses)]
    return to_batch(prompts, outputs, pad)
