"""What the supervised loop trains: a task has data, a model and a loss. `SFTTask` learns the assistant's turns,
`PairTask` trains a reward model on pairs of answers."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain import pulse
from posttrain.algorithms import aggregation_weights
from posttrain.controller.pool import LocalWorkers, Workers
from posttrain.data.chat import TrainedRow
from posttrain.data.recipes.arithmetic import pair_rows, write_files
from posttrain.data.sampler import sequential_batches
from posttrain.data.supervised import Pair, PairDataset, SFTDataset
from posttrain.models.scorer import without_trailing_padding
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.texts import common_start
from posttrain.workers.supervised import PairGroup, PairWorker, SFTGroup, SFTWorker, SupervisedGroup, pair_losses

Metrics = dict[str, float]
# Of the workers, and the folder of a checkpoint that holds their weights and optimizer state.
ROLE = "model"


class Task(ABC):
    """Data, a model and a loss. `rows` is the number of training rows, `curve` the metric that is drawn at the end."""

    stem: str  # begins the names of runs that have none of their own
    dataset: type[SFTDataset] | type[PairDataset]
    worker: type  # holds the model, its optimizer and its loss; here are the rows
    group_type: type[SupervisedGroup]  # the calls of these workers
    curve: str

    def __init__(
        self,
        config: Any,
        *,
        tokenizer: Any,
        train: Any,
        val: Any | None,
        device: torch.device,
        total_steps: int,
        workers: Workers | None = None,
    ) -> None:
        self.config, self.tokenizer, self.train, self.val, self.rows = config, tokenizer, train, val, len(train)
        made = (workers or LocalWorkers()).create(ROLE, self.worker, config, tokenizer, device, total_steps=total_steps)
        self.group = self.group_type(made)
        self.group.init_model()
        # What a checkpoint says of the adapters and their base; None where all weights are trained.
        self.adapters: dict[str, Any] | None = self.group.lora_state()

    @staticmethod
    @abstractmethod
    def embedded_files(folder: Path) -> dict[str, Path]:
        """`train` and `test` of the embedded data, which lie in this folder or are made from what does."""

    @staticmethod
    @abstractmethod
    def describe(train: Any, val: Any | None, steps: int) -> str:
        """The run in one sentence, for its start."""

    @abstractmethod
    def train_step(self, rows: list[int]) -> Metrics:
        """One optimizer step on these rows; gives `loss`, the engine's metrics, `tokens` and the task's own."""

    @abstractmethod
    def validate(self) -> Metrics | None:
        """Metrics of the held-out rows by their logged names; None where there are none."""

    @abstractmethod
    def pieces(self, metrics: Mapping[str, float]) -> list[tuple[int, str | None]]:
        """A step's line in (importance, text); what does not fit one row is left out, least important first."""

    @abstractmethod
    def validation_line(self, metrics: Mapping[str, float]) -> str:
        """A validation's metrics on one line."""

    @abstractmethod
    def goodness(self, validation: Mapping[str, float]) -> float:
        """By which the best checkpoint is chosen, largest best."""


def sft_batch(rows: Sequence[TrainedRow], pad_token_id: int) -> DataProto:
    """Rows as a batch: what precedes the first trained token is the prompt, what follows the last one is left out.

    `response_mask` marks the trained tokens; `loss_weights` make their mean over the whole batch.
    """
    bounds = [(1 + row.trained[1:].index(True), len(row.ids) - row.trained[::-1].index(True)) for row in rows]
    responses = [row.ids[start:end] for row, (start, end) in zip(rows, bounds, strict=True)]
    outputs = [Output(number, ids, [0.0] * len(ids), "stop") for number, ids in enumerate(responses)]
    prompts = [row.ids[:start] for row, (start, _) in zip(rows, bounds, strict=True)]
    batch = to_batch(prompts, outputs, pad_token_id)
    mask = batch.batch["response_mask"]
    for number, (row, (start, end)) in enumerate(zip(rows, bounds, strict=True)):
        mask[number, : end - start] = torch.tensor(row.trained[start:end])
    return batch.union(DataProto.from_dict(tensors={"loss_weights": aggregation_weights(mask, "token-mean")}))


class SFTTask(Task):
    """A causal language model that learns the assistant's turns."""

    stem, dataset, curve = "sft", SFTDataset, "val/loss"
    worker, group_type = SFTWorker, SFTGroup
    group: SFTGroup
    train: SFTDataset
    val: SFTDataset | None

    @staticmethod
    def embedded_files(folder: Path) -> dict[str, Path]:
        return {"train": folder / "train.json", "test": folder / "test.json"}

    @staticmethod
    def describe(train: SFTDataset, val: SFTDataset | None, steps: int) -> str:
        trained, total = train.tokens
        kind = "conversations" if train.multiturn else "prompts with responses"
        held_out = f"{len(val)} rows are held out" if val is not None else "no rows are held out"
        return (
            f"SFT: {steps} optimizer steps on {len(train)} rows ({kind}); an epoch has {total} tokens, {trained} of "
            f"them the assistant's, which are trained; {held_out}."
        )

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
        # exp(710) overflows a double: an untrained model must not end the run by its perplexity.
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


def pair_batch(pairs: Sequence[Pair], pad_token_id: int) -> DataProto:
    """Two rows per pair, the better first; `prompts` is what both have in common, and one token stands behind each
    answer (see `ScoreHead` in `engine/heads.py`). `pair_weights` make a mean over the whole batch in any split."""
    prompts, answers = [], []
    for pair in pairs:
        rows = [without_trailing_padding(ids, pad_token_id) for ids in (pair.chosen, pair.rejected)]
        shared = max(1, common_start(*rows))  # where they have nothing in common, a prompt is a row's own first token
        prompts += [row[:shared] for row in rows]
        answers += [[*row[shared:], pad_token_id] for row in rows]
    outputs = [Output(number, ids, [0.0] * len(ids), "stop") for number, ids in enumerate(answers)]
    batch = to_batch(prompts, outputs, pad_token_id)
    margins = torch.tensor([pair.margin for pair in pairs for _ in range(2)])
    weights = torch.full((2 * len(pairs),), 1.0 / len(pairs), dtype=torch.float64)
    return batch.union(DataProto.from_dict(tensors={"margins": margins, "pair_weights": weights}))


def embedded_pairs(folder: Path) -> dict[str, Path]:
    """Pairs of a right and a wrong sum, made from the embedded sums."""
    paths = {name: folder / "pairs" / f"{name}.json" for name in ("train", "test")}
    if not all(path.exists() for path in paths.values()):
        sums = {name: json.loads((folder / f"{name}.json").read_text()) for name in paths}
        write_files(folder / "pairs", {name: pair_rows(rows) for name, rows in sums.items()})
    return paths


class PairTask(Task):
    """A scorer with one score per row, from a causal LM (with a new head) or from a sequence-classification folder."""

    stem, dataset, curve = "reward-model", PairDataset, "val/accuracy"
    worker, group_type = PairWorker, PairGroup
    group: PairGroup
    train: PairDataset
    val: PairDataset | None

    @staticmethod
    def embedded_files(folder: Path) -> dict[str, Path]:
        return embedded_pairs(folder)

    @staticmethod
    def describe(train: PairDataset, val: PairDataset | None, steps: int) -> str:
        held_out = f"{len(val)} pairs are held out" if val is not None else "no pairs are held out"
        return f"Reward model: {steps} optimizer steps on {len(train)} pairs; {held_out}."

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.pad_token_id = self.group.pad_token_id()

    def train_step(self, rows: list[int]) -> Metrics:
        batch = pair_batch([self.train[row] for row in rows], self.pad_token_id)
        made = self.group.update(batch)
        lead = made.pop("leads")
        tokens = float(batch.batch["attention_mask"].sum() - len(batch))
        return {**made, **_of_leads(lead), "rows": float(len(lead)), "tokens": tokens}

    def validate(self) -> Metrics | None:
        if self.val is None:
            return None
        losses, leads, scores = [], [], []
        with pulse.work("rows", 2 * len(self.val)):
            for rows in sequential_batches(len(self.val), self.config.data.train_batch_size):
                batch = pair_batch([self.val[row] for row in rows], self.pad_token_id)
                found = self.group.scores(batch).batch["scores"].double()
                part, lead = pair_losses(batch, found, self.config.loss.center_coef)
                losses.append(part)
                leads.append(lead)
                scores.append(found)
        loss, mean = float(torch.cat(losses).mean()), float(torch.cat(scores).mean())
        made = {"loss": loss, **_of_leads(torch.cat(leads)), "score_mean": mean}
        return {f"val/{name}": value for name, value in made.items()}

    def pieces(self, metrics: Mapping[str, float]) -> list[tuple[int, str | None]]:
        return [
            (6, f"loss {metrics['train/loss']:.4f}"),
            (5, f"accuracy {metrics['train/accuracy']:.3f}"),
            (4, f"margin {metrics['train/margin']:.3f}"),
            (1, f"grad norm {metrics['train/grad_norm']:.3g}"),
            (0, f"lr {metrics['train/lr']:.3g}"),
            (2, f"{metrics['perf/throughput']:,.0f} tok/s"),
            (3, f"{metrics['perf/time_per_step']:.1f} s"),
        ]

    def validation_line(self, metrics: Mapping[str, float]) -> str:
        accuracy, margin = metrics["val/accuracy"], metrics["val/margin"]
        return f"accuracy {accuracy:.3f}, margin {margin:.3f}, loss {metrics['val/loss']:.4f}"

    def goodness(self, validation: Mapping[str, float]) -> float:
        return validation["val/accuracy"]


def _of_leads(lead: torch.Tensor) -> Metrics:
    """Share of pairs whose better answer leads (equal scores count half), and the mean lead."""
    right = (lead > 0).double() + 0.5 * (lead == 0).double()
    return {"accuracy": float(right.mean()), "margin": float(lead.double().mean())}
