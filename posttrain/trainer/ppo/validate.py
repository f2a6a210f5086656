"""Validation: k responses per held-out prompt, scored by the same reward; mean@k, pass@k and maj@k per data source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain import pulse
from posttrain.data.collate import collate
from posttrain.data.dataset import PromptDataset
from posttrain.data.sampler import sequential_batches
from posttrain.rollout.sampling import row_seeds
from posttrain.tracking.validation import validation_metrics
from posttrain.trainer.answers import given_answer

if TYPE_CHECKING:
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

VALIDATION_SEED = 7  # keeps validation's random numbers apart from training's
NAMES = ("source", "uid", "score", "parts", "prompt", "response", "error")
SHOWN = 5  # samples kept for the before/after table


class Validator:
    """Runs over the whole validation set with `rollout.val_kwargs`."""

    def __init__(self, trainer: RayPPOTrainer, dataset: PromptDataset) -> None:
        self.trainer, self.dataset = trainer, dataset

    def run(self, step: int) -> dict[str, float]:
        """Metrics by name; also remembers a few samples for the end of the run."""
        columns: dict[str, list[Any]] = {name: [] for name in NAMES}
        responses = len(self.dataset) * self.trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        most_tokens = self.trainer.config.data.max_response_length
        shown = self.trainer.recorder.showing("validation")
        with shown, pulse.work("responses", responses, most_tokens=most_tokens):
            for rows in sequential_batches(len(self.dataset), self.trainer.config.data.val_batch_size):
                self._run_batch(rows, columns)
        rows_of = zip(*(columns[name] for name in ("source", "response", "parts", "error")), strict=True)
        metrics = validation_metrics(
            data_sources=columns["source"],
            uids=columns["uid"],
            scores=columns["score"],
            parts=columns["parts"],
            answers=[given_answer(*row) for row in rows_of],
        )
        samples = [
            {"prompt": columns["prompt"][row], "response": columns["response"][row], "score": columns["score"][row]}
            for row in range(0, len(columns["uid"]), max(1, len(columns["uid"]) // SHOWN))
        ]
        self.trainer.recorder.record_validation(step, metrics, samples)
        return metrics

    def _run_batch(self, rows: list[int], columns: dict[str, list[Any]]) -> None:
        trainer = self.trainer
        n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        batch = collate([self.dataset[row] for row in rows], pad_token_id=trainer.tokenizer.pad_token_id)
        batch.non_tensor_batch["uid"] = np.array([f"val-{row}" for row in rows], dtype=object)
        batch = batch.repeat(repeat_times=n, interleave=True)
        seed = trainer.config.trainer.seed
        seeds = row_seeds(len(batch), seed, VALIDATION_SEED, rows[0])
        gen_batch = batch.select([], ["raw_prompt_ids"])
        gen_batch.non_tensor_batch["seed"] = np.array(seeds, dtype=object)
        gen_batch.meta_info["validate"] = True
        trainer.reward_fn.begin(batch)
        output = trainer.actor_rollout_wg.generate_sequences(
            gen_batch, on_outputs=lambda ended: trainer.reward_fn.feed([(one.id, one.token_ids) for one in ended])
        )
        batch.union(trainer.reward_fn.finish())
        if trainer.model_reward:
            output.meta_info.clear()
            batch = batch.select([]).union(output)
            trainer.model_reward.join(batch, validation=True)
        scored = fields = batch.non_tensor_batch
        default = trainer.config.data.data_source or "unknown"
        columns["source"] += [source or default for source in fields["data_source"]]
        columns["uid"] += list(fields["uid"])
        columns["score"] += [float(score) for score in scored["reward_score"]]
        columns["parts"] += list(scored["reward_parts"])
        columns["error"] += list(scored["reward_error"])
        columns["prompt"] += [messages[-1]["content"] for messages in fields["raw_prompt"]]
        masks = output.batch["response_mask"].bool()
        ids = [row[mask].tolist() for row, mask in zip(output.batch["responses"], masks, strict=True)]
        columns["response"] += trainer.tokenizer.batch_decode(ids, skip_special_tokens=True)
