"""Scores of a reward model that has workers of its own: a group of responses goes to one of them as soon as its last
response has ended, while others are still generated.

Each group is scored by itself, whatever else is under way: so scores depend neither on a clock, nor on the number of
workers, nor on whether a batch comes from a checkpoint, where no group was scored before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.batch.columns import Column
from posttrain.batch.compact import compact, lengths_of
from posttrain.controller.group import Future
from posttrain.controller.incidents import WorkerDied
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.tracking.metrics import groups_of
from posttrain.workers.groups import RewardModelGroup

READ = ("input_ids", "attention_mask", "responses")
Key = tuple[Any, int]  # (uid, sample)


Scores = tuple[np.ndarray, list[str | None], np.ndarray]
"""(score, error, whether it was truncated) of each row"""


def read_scores(found: DataProto) -> Scores:
    """What a reward model's workers have answered."""
    fields = found.non_tensor_batch
    return found.batch["rm_scores"].sum(-1).numpy(), list(fields["rm_error"]), np.asarray(fields["rm_truncated"])


@dataclass
class _Group:
    """A group that was asked for: its samples in order, the prompt's messages, and the responses that have ended."""

    keys: list[Key]
    messages: Any
    ended: dict[Key, Output] = field(default_factory=dict)


@dataclass
class _Call:
    """Rows that a worker scores: the samples of a group, in this order."""

    keys: list[Key]
    rows: DataProto
    worker: int
    scores: Future[DataProto]

    def places_of(self, keys: Sequence[Key], rows: DataProto) -> list[int] | None:
        """Which of its rows these are. None where one of them is not as it was sent: a stage of a user's own trainer
        may have changed responses, or have added some."""
        numbers = {key: number for number, key in enumerate(self.keys)}
        if not numbers.keys() >= set(keys):
            return None
        places = [numbers[key] for key in keys]
        sent = self.rows if places == list(range(len(self.keys))) else self.rows[places]
        if not all(map(np.array_equal, lengths_of(sent), lengths_of(rows))):
            return None
        if isinstance(rows.batch.column("responses"), Column):  # it lies where the worker wrote it
            return places
        pairs = zip(sent.batch["responses"], rows.batch["responses"], lengths_of(rows)[1].tolist(), strict=True)
        return places if all(torch.equal(one[:length], other[:length]) for one, other, length in pairs) else None


class GroupScores:
    """`expect` rows, `feed` their responses as they end, and ask for the scores of whole batches.

    `replace` puts a new worker in the place of a lost one, and gives its number; it raises the loss where that cannot
    be done.
    """

    def __init__(
        self, workers: RewardModelGroup, pad_token_id: int, replace: Callable[[WorkerDied], int] | None = None
    ) -> None:
        self.workers, self.pad_token_id, self.replace = workers, pad_token_id, replace
        self._expected: dict[Any, _Group] = {}
        self._calls: dict[Any, _Call] = {}
        self._given: Counter[int] = Counter()  # tokens, by worker

    def expect(self, rows: DataProto) -> None:
        """Rows of whole groups whose responses will be fed."""
        fields = rows.non_tensor_batch
        messages = fields["raw_prompt"] if "raw_prompt" in fields else [None] * len(rows)
        for uid, sample, said in zip(fields["uid"].tolist(), fields["sample"].tolist(), messages, strict=True):
            self._expected.setdefault(uid, _Group([], said)).keys.append((uid, sample))

    def feed(self, ended: Sequence[Output], prompts: Mapping[Key, Sequence[int]]) -> None:
        """Responses that have ended, with the ids of their prompts; groups that are whole are scored from here on."""
        for output in ended:
            group = self._expected.get(output.id[0])
            if group is None:  # of a validation, which is scored as one batch
                continue
            group.ended[output.id] = output
            if len(group.ended) == len(group.keys):
                self._begin(output.id[0], group.keys, self._rows(group, prompts))
                del self._expected[output.id[0]]

    def _rows(self, group: _Group, prompts: Mapping[Key, Sequence[int]]) -> DataProto:
        made = to_batch([prompts[key] for key in group.keys], [group.ended[k] for k in group.keys], self.pad_token_id)
        messages = np.empty(len(group.keys), dtype=object)
        messages[:] = [group.messages] * len(group.keys)
        made.non_tensor_batch["raw_prompt"] = messages
        return made

    def _begin(self, uid: Any, keys: list[Key], rows: DataProto) -> None:
        """To the worker that was given the fewest tokens so far; which one that is changes no score."""
        sent = compact(rows.select(list(READ), [name for name in ("raw_prompt",) if name in rows.non_tensor_batch], []))
        # Not the one with the fewest groups under way: to look at all calls for each group takes longer than they do.
        worker = min(range(self.workers.world_size), key=lambda number: self._given[number])
        self._given[worker] += int(sum(map(np.sum, lengths_of(sent))))
        self._calls[uid] = _Call(keys, sent, worker, self.workers.compute_rm_score.on(worker, sent))

    def forget(self, uids: Iterable[Any]) -> None:
        """Groups that will not be trained on."""
        for uid in uids:
            self._expected.pop(uid, None)
            self._calls.pop(uid, None)

    def at_once(self, batch: DataProto) -> Scores:
        """Of a batch that is spread over the workers as it is."""
        while True:
            try:
                return read_scores(self.workers.compute_rm_score(batch))
            except WorkerDied as death:
                if self.replace is None:
                    raise
                self._send_again(self.replace(death))

    def of(self, batch: DataProto) -> Scores:
        """Of whole groups; those that are not being scored yet, or not as they are in this batch, are begun here."""
        rows_of = {batch.non_tensor_batch["uid"][rows[0]]: rows for rows in groups_of(batch.non_tensor_batch["uid"])}
        compared, places_of = batch.select(["attention_mask", "responses"], ["sample"]), dict[Any, list[int]]()
        for uid, rows in rows_of.items():
            own, call = compared[rows], self._calls.get(uid)
            keys = [(uid, sample) for sample in own.non_tensor_batch["sample"]]
            places = call.places_of(keys, own) if call is not None else None
            if places is None:
                self._begin(uid, keys, batch[rows])
            places_of[uid] = list(range(len(own))) if places is None else places
        scores_B, truncated_B = np.zeros(len(batch)), np.zeros(len(batch), dtype=object)
        errors: list[str | None] = [None] * len(batch)
        for uid, rows in rows_of.items():
            places = places_of[uid]
            found_B, own_errors, cut_B = read_scores(self._result(uid))
            scores_B[rows], truncated_B[rows] = found_B[places], cut_B[places]
            for row, place in zip(rows.tolist(), places, strict=True):
                errors[row] = own_errors[place]
            del self._calls[uid]
        return scores_B, errors, truncated_B

    def _result(self, uid: Any) -> DataProto:
        while True:
            try:
                return self.workers.group.wait(self._calls[uid].scores)
            except WorkerDied as death:
                if self.replace is None:
                    raise
                self._send_again(self.replace(death))

    def _send_again(self, worker: int) -> None:
        """The groups of a worker that was replaced; a score that it had given is given once more."""
        for call in self._calls.values():
            if call.worker == worker:
                call.scores = self.workers.compute_rm_score.on(worker, call.rows)
