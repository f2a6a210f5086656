"""Validation: k responses per held-out prompt, scored by the same reward; mean@k, pass@k and maj@k per data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrain import pulse
from posttrain.batch.samples import last_rows
from posttrain.config.trainer import DataConfig
from posttrain.data.dataset import PromptDataset, collate
from posttrain.data.sampler import sequential_batches
from posttrain.protocol import DataProto
from posttrain.rewards.answers import read_answer
from posttrain.texts import own_words, texts_of
from posttrain.tracking.metrics import answer_of, has_answer, validation_metrics
from posttrain.trainer.ppo.experience import Experience
from posttrain.trainer.ppo.recorder import Recorder

VALIDATION_SEED = 7  # keeps validation's random numbers apart from training's
NAMES = ("source", "uid", "score", "parts", "prompt", "response", "written", "error")
SHOWN = 5  # samples kept for the before/after table


def given_answer(data_source: str | None, response: str, parts: Mapping[str, Any], error: str | None) -> str | None:
    """The answer of a response, for maj@k: as its reward reports it, or else as it is read from the text.

    None where there is no answer, or where the response could not be scored.
    """
    if error is not None or has_answer(parts):
        return answer_of(parts)
    return read_answer(data_source, response)


class Validator:
    """Runs over the whole validation set with `rollout.val_kwargs`."""

    def __init__(
        self,
        settings: DataConfig,
        n: int,
        tokenizer: Any,
        dataset: PromptDataset,
        experience: Experience,
        recorder: Recorder,
    ) -> None:
        """`n` responses to every prompt."""
        self.settings, self.n, self.tokenizer, self.dataset = settings, n, tokenizer, dataset
        self.experience, self.recorder = experience, recorder

    def run(self, step: int) -> dict[str, float]:
        """Metrics by name; also remembers a few samples for the end of the run."""
        columns: dict[str, list[Any]] = {name: [] for name in NAMES}
        tables: list[Any] = []
        responses = len(self.dataset) * self.n
        shown, most_tokens = self.recorder.showing("validation"), self.settings.max_response_length
        with shown, pulse.work("responses", responses, most_tokens=most_tokens):
            for rows in sequential_batches(len(self.dataset), self.settings.val_batch_size):
                scored = self._scored(rows)
                self._add(scored[np.unique(last_rows(scored))], columns)
                tables.append(self.recorder.validation_table(step, scored))
        rows_of = zip(*(columns[name] for name in ("source", "written", "parts", "error")), strict=True)
        metrics = validation_metrics(
            data_sources=columns["source"],
            uids=columns["uid"],
            scores=columns["score"],
            parts=columns["parts"],
            answers=[given_answer(*row) for row in rows_of],
        )
        samples = [
            {"prompt": columns["prompt"][row], "response": columns["response"][row], "score": columns["score"][row]}
            # Spread over the whole set, which may hold several data sources one after the other.
            for row in range(0, len(columns["uid"]), max(1, len(columns["uid"]) // SHOWN))
        ]
        self.recorder.write_validation_samples(step, tables)
        self.recorder.record_validation(step, metrics, samples)
        return metrics

    def _scored(self, rows: list[int]) -> DataProto:
        """Responses to these prompts of the held-out data, scored; a prompt's serial number is its row there."""
        prompts = collate([self.dataset[row] for row in rows], pad_token_id=self.tokenizer.pad_token_id)
        # Seeds follow from the row's number, not from a counter: all validations of a run draw the same numbers.
        prompts.non_tensor_batch["serial"] = np.array(rows, dtype=object)
        prompts.non_tensor_batch["uid"] = np.array([f"val-{row}" for row in rows], dtype=object)
        asked = self.experience.ask(prompts, self.n, stream=VALIDATION_SEED, validate=True)
        return self.experience.complete(asked, validation=True)

    def _add(self, batch: DataProto, columns: dict[str, list[Any]]) -> None:
        fields, default = batch.non_tensor_batch, self.settings.data_source or "unknown"
        columns["source"] += [source or default for source in fields["data_source"]]
        columns["uid"] += list(fields["uid"])
        columns["score"] += [float(score) for score in fields["reward_score"]]
        columns["parts"] += list(fields["reward_parts"])
        columns["error"] += list(fields["reward_error"])
        columns["prompt"] += [messages[-1]["content"] for messages in fields["raw_prompt"]]
        responses = batch.batch["responses"]
        real = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()  # with what tools said, as it was scored
        ids = [row[mask].tolist() for row, mask in zip(responses, real, strict=True)]
        texts = texts_of(ids, self.tokenizer)
        columns["response"] += texts
        if "num_turns" in fields:
            own = batch.batch["response_mask"].bool()
            texts = own_words(ids, [row[mask].tolist() for row, mask in zip(own, real, strict=True)], self.tokenizer)
        columns["written"] += texts  # answers are read from it
