"""Supervised fine-tuning: the mean negative log-likelihood of the assistant's tokens, over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from posttrain import pulse
from posttrain.data.sampler import sequential_batches
from posttrain.data.supervised import SFTDataset
from posttrain.trainer.sft import sft_batch
from posttrain.trainer.supervised.task import Metrics, Task
from posttrain.workers.supervised import SFTWorker


class SFTTask(Task):
    """A causal language model that learns the assistant's turns."""

    worker, curve = SFTWorker, "val/loss"
    train: SFTDataset
    val: SFTDataset | None

    def train_step(self, rows: list[int]) -> Metrics:
        batch = sft_batch([self.train[row] for row in rows], self.tokenizer.pad_token_id)
        counts = {
            "tokens": float(batch.batch["attention_mask"].sum()),
            "trained_tokens": float(batch.batch["response_mask"].sum()),
            "rows": float(len(batch)),
        }
        return {**self.group.update(batch), **counts}

    def validate(self) -> Metrics | None:
        if self.val is None:
            return None
        total, count = 0.0, 0
        with pulse.work("rows", len(self.val)):
            for rows in sequential_batches(len(self.val), self.config.data.train_batch_size):
                batch = sft_batch([self.val[row] for row in rows], self.tokenizer.pad_token_id)
                log_probs, mask = self.group.log_probs(batch).batch["log_probs"], batch.batch["response_mask"]
                total -= float((log_probs.double() * mask).sum())
                count += int(mask.sum())
        loss = total / count
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), "val/trained_tokens": float(count)}

    def pieces(self, metrics: Mapping[str, float]) -> list[tuple[int, str | None]]:
        trained, tokens = metrics["train/trained_tokens"], metrics["perf/total_num_tokens"]
        return [
            (5, f"loss {metrics['train/loss']:.4f}"),
            (2, f"grad norm {metrics['train/grad_norm']:.3g}"),
            (1, f"lr {metrics['train/lr']:.3g}"),
            (0, f"{trained:,.0f} of {tokens:,.0f} tokens"),
            (3, f"{metrics['perf/throughput']:,.0f} tok/s"),
            (4, f"{metrics['perf/time_per_step']:.1f} s"),
        ]

    def validation_line(self, metrics: Mapping[str, float]) -> str:
        return f"loss {metrics['val/loss']:.4f}, perplexity {metrics['val/perplexity']:.4g}"

    def goodness(self, validation: Mapping[str, float]) -> float:
        return -validation["val/loss"]
