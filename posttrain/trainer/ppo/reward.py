"""Scores of responses, computed in worker processes while other responses are still being generated.

Shapes: B rows, R response width.

A reward model's scores beside those of the reward functions: each recorded as a part, both summed with weights.

    reward = reward_model.weight x model + reward_model.function_weight x function

A function that nobody named (the built-in scorer of the rows' data source) has weight 0: it only tells whether
responses are right. A response that one of the counted two could not score gets `reward.failure_score`, and its error
says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from posttrain.algorithms import overlong_penalty
from posttrain.algorithms.reward_terms import OVERLONG, SCORE
from posttrain.batch.columns import Column, LastTokenColumn, MaskColumn
from posttrain.batch.compact import lengths_of
from posttrain.batch.samples import last_rows, rows_of_samples
from posttrain.config.rollout import OverlongBufferConfig, RewardConfig, RewardModelConfig
from posttrain.conversations.conversation import Conversation
from posttrain.conversations.loop import ConversationLoop, reward_info
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.protocol import DataProto
from posttrain.rewards.combined import RIGHT, asks_sources, named_sources, read_parts
from posttrain.rewards.crew import WorkerProcess
from posttrain.rewards.pool import PrintLimiter, RewardPool
from posttrain.rewards.scorers import check_sources
from posttrain.rewards.scorers.code import check_programs, code_settings
from posttrain.rewards.signatures import read_result
from posttrain.rewards.types import TOO_LARGE, FailureWatch, RewardItem, RewardPart, RewardResult, RewardSpec, is_usable
from posttrain.rollout.base import Output
from posttrain.rollout.stored import StoredSequence
from posttrain.texts import own_words, texts_of
from posttrain.trainer.ppo.group_scores import GroupScores, read_scores
from posttrain.workers.groups import RewardModelGroup

Key = tuple[Any, int]  # (uid, sample): a response among those to its prompt
_WHERE = "custom_reward_function, reward.functions, or the rows' data_source"


def make_reward_pool(
    spec: RewardSpec,
    limits: RewardConfig,
    sources: set[str | None],
    say: Callable[[str], object],
    *,
    check: bool = True,
    first: WorkerProcess | None = None,
) -> RewardPool:
    """The workers that score with the reward functions, after everything that can be checked about these.

    `check` rejects data sources that no built-in scorer knows; agents may give all rewards themselves. `first` is a
    worker that has loaded the function already.
    """
    by_source = asks_sources(spec)
    if by_source and check:
        check_sources(sources)
    spec.code = code_settings(limits)
    named = named_sources(spec)
    check_machine = partial(check_programs, sources | named, limits.sandbox, must_run=by_source or bool(named))
    for note in check_machine():
        say(f"note: {note}")
    return RewardPool(
        spec,
        num_workers=limits.num_workers,
        timeout_s=limits.timeout_s,
        failure_score=limits.failure_score,
        on_print=PrintLimiter(say),
        first=first,
        check_machine=check_machine,
    )


class RewardManager:
    """`expect` rows, `feed` their responses as they end, `poll` or `wait` for scores; or call it on a whole batch.

    Rows of any number of batches can be expected at once: each is known by its (uid, sample). Without a pool all
    scores are 0: a reward model gives them. `named` says whether the user named the function, `prompts_are_texts`
    whether functions of TRL's form get prompts and completions as texts, not as lists of messages.
    """

    def __init__(
        self,
        pool: RewardPool | None,
        tokenizer: Any,
        *,
        default_source: str | None = None,
        named: bool = True,
        prompts_are_texts: bool = False,
    ) -> None:
        self.prompts_are_texts = prompts_are_texts
        self.progress: tuple[int, int] = (0, 0)  # steps that are done, and steps of the run
        self.pool, self.tokenizer, self.default_source, self.named = pool, tokenizer, default_source, named
        self._expected: dict[Key, tuple[Any, ...]] = {}
        self._unscored: list[tuple[Key, RewardResult]] = []
        self.has_no_function = pool is None  # whether there is no function that could score
        # Ends the run when no response can be scored; None where another reward gives the scores.
        self.watch: FailureWatch | None = FailureWatch("reward", _WHERE) if pool is not None else None

    @property
    def parts(self) -> list[RewardPart]:
        """The functions of a reward that is a weighted sum."""
        return self.pool.spec.parts if self.pool is not None else []

    def expect(self, rows: DataProto) -> None:
        """The rows that responses will be fed for, with their truths and groups."""
        fields = rows.non_tensor_batch
        columns = [fields[name].tolist() for name in ("uid", "data_source", "ground_truth", "extra_info")]
        columns.append(fields["raw_prompt"].tolist() if "raw_prompt" in fields else [None] * len(rows))
        size = Counter(columns[0])  # functions that compare a group are called once all of it has ended
        for key, uid, *facts in zip(keys_of(rows), *columns, strict=True):
            self._expected[key] = (uid, size[uid], *facts)

    def feed(
        self,
        responses: Sequence[tuple[Key, Sequence[int]]],
        more: Mapping[Key, Mapping[str, Any]] | None = None,
        marks: Mapping[Key, Sequence[Any]] | None = None,
        texts: Mapping[Key, str] | None = None,
    ) -> None:
        """Score responses, each with its row's key and its token ids; returns at once. `more` is added to the
        `extra_info` of some. `marks` say which tokens the model wrote itself, of those of several turns; their
        `extra_info` has these words as `own_words`. `texts` are those of responses that were decoded already."""
        expected = [self._expected.pop(key) for key, _ in responses]
        if self.pool is None:
            self._unscored += [(key, RewardResult(0.0)) for key, _ in responses]
            return
        if not responses:
            return
        known = texts or {}
        decoded = iter(self._texts([ids for key, ids in responses if key not in known]))
        whole = [known[key] if key in known else next(decoded) for key, _ in responses]
        written = self._written(responses, marks or {})
        items: list[tuple[Key, RewardItem]] = []
        progress = self.progress  # one object: what items share is pickled once
        for (key, ids), text, row in zip(responses, whole, expected, strict=True):
            uid, size, source, truth, extra_info, prompt = row
            own, tokens = written.get(key, (None, len(ids)))
            if more and key in more:
                extra_info = {**(extra_info or {}), **more[key], "own_words": text if own is None else own}
            prompt = prompt[-1]["content"] if prompt and self.prompts_are_texts else prompt
            given: Sequence[int] | None = ids
            if isinstance(ids, StoredSequence):  # fetched only for functions of TRL's form, which may read the ids
                given = list(ids) if self.pool.spec.form == "batch" else None
            item = RewardItem(
                source or self.default_source, text, truth, extra_info, uid, size, tokens, own, prompt, given, progress
            )
            items.append((key, item))
        self.pool.submit_many(items)

    def settle(self, scored: Sequence[tuple[Key, RewardResult]]) -> None:
        """Rows that have their scores by other means than the reward function."""
        for key, _ in scored:
            uid, size, *_ = self._expected.pop(key)
            if self.pool is not None:
                self.pool.shrink_group(uid, size)  # or a function that compares a group would wait for it for ever
        self._unscored += scored

    def _written(
        self, responses: Sequence[tuple[Key, Sequence[int]]], marks: Mapping[Key, Sequence[Any]]
    ) -> dict[Key, tuple[str, int]]:
        """What the model wrote itself of responses that hold other words too, and its number of tokens."""
        mixed = [(key, ids, marks[key]) for key, ids in responses if key in marks and not all(marks[key])]
        own = own_words([ids for _, ids, _ in mixed], [mark for *_, mark in mixed], self.tokenizer) if mixed else []
        return {key: (text, int(sum(mark))) for (key, _, mark), text in zip(mixed, own, strict=True)}

    def _texts(self, responses: list[Sequence[int]]) -> list[str]:
        # Short responses often repeat: each distinct one is decoded once.
        keys = [tuple(ids) for ids in responses]
        different = list(set(keys))
        texts = dict(zip(different, texts_of(different, self.tokenizer), strict=True))
        return [texts[key] for key in keys]

    def poll(self) -> list[tuple[Any, RewardResult]]:
        """What was scored since the last call, without waiting."""
        return self._take_results() + ([] if self.pool is None else self.pool.poll())

    def wait(self) -> list[tuple[Any, RewardResult]]:
        """As `poll`, but at least one if any is being scored."""
        return self._take_results() or ([] if self.pool is None else self.pool.wait_some())

    def _take_results(self) -> list[tuple[Any, RewardResult]]:
        found, self._unscored = self._unscored, []
        return found

    def fields(self, results: Sequence[RewardResult]) -> DataProto:
        """`reward_score`, `reward_parts` and `reward_error` of each row of a batch."""
        if self.watch is not None:
            self.watch.check([result.error for result in results])
        return DataProto.from_dict(
            non_tensors={
                "reward_score": [result.score for result in results],
                "reward_parts": [dict(result.parts) for result in results],
                "reward_error": [result.error for result in results],
            }
        )

    def score(self, data: DataProto) -> DataProto:
        """Scores of responses that are all there; nothing else may be under way. Of a sample of several rows the last
        one is scored."""
        last, place_B = np.unique(last_rows(data), return_inverse=True)
        if len(last) < len(data):
            return self.score(data[last])[place_B]
        self.expect(data)
        keys, real = keys_of(data), data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :].bool()
        own = data.batch.get("response_mask", real)
        pairs = zip(keys, data.batch["responses"], real, strict=True)
        marks = {key: marks[mask].tolist() for key, marks, mask in zip(keys, own, real, strict=True)}
        self.feed([(key, ids[mask].tolist()) for key, ids, mask in pairs], marks=marks)
        found: dict[Any, RewardResult] = {}
        while new := self.wait():  # in the order in which workers finish; the batch's order is restored below
            found.update(new)
        return self.fields([found[key] for key in keys_of(data)])

    def __call__(self, data: DataProto) -> torch.Tensor:
        """(B, R): each row's score on its last response token, 0 elsewhere."""
        scores = self.score(data).non_tensor_batch["reward_score"]
        return _last_tokens(np.array([float(score) for score in scores], np.float32), data).value()


def keys_of(rows: DataProto) -> list[Key]:
    """(uid, sample) of each row; without a column `sample` rows are numbered within their group."""
    fields = rows.non_tensor_batch
    if "sample" in fields:
        return list(zip(fields["uid"].tolist(), fields["sample"].tolist(), strict=True))
    seen: Counter[Any] = Counter()
    keys = []
    for uid in fields["uid"].tolist():
        keys.append((uid, seen[uid]))
        seen[uid] += 1
    return keys


def on_last_token(scores_B: np.ndarray, data: DataProto) -> torch.Tensor | Column:
    """(B, R): each score on the last token of its response; of responses that lie in a store as a column that is made
    where it is read."""
    column = _last_tokens(scores_B, data)
    return column if isinstance(data.batch.column("attention_mask"), MaskColumn) else column.value()


def _last_tokens(scores_B: np.ndarray, data: DataProto) -> LastTokenColumn:
    return LastTokenColumn(scores_B, lengths_of(data)[1], data.batch.shape("responses")[1])


def place_scores(scores_B: np.ndarray, data: DataProto) -> torch.Tensor | Column:
    """(B, R): each score on the last token of its response; one that is the sum of its turns' rewards at the ends of
    these turns."""
    placed = on_last_token(scores_B, data)
    moved = list(_rewards_before_the_end(data))
    if not moved:
        return placed
    tokens_BR = (placed if isinstance(placed, torch.Tensor) else placed.value()).double()
    last_B = lengths_of(data)[1] - 1
    for row, token, last_row, reward in moved:
        tokens_BR[last_row, int(last_B[last_row])] -= reward
        tokens_BR[row, token] += reward
    return tokens_BR.float()


def _rewards_before_the_end(data: DataProto) -> Iterator[tuple[int, int, int, float]]:
    """(row, token, last row of the sample, reward) of turns before the last one, in samples whose score is the sum."""
    fields = data.non_tensor_batch
    if "turn_rewards" not in fields:
        return
    for rows in rows_of_samples(data):
        last, rewards = int(rows[-1]), fields["turn_rewards"][rows[-1]]
        total = sum(reward for _, reward in rewards)
        if not rewards or not math.isclose(total, fields["reward_score"][last], rel_tol=1e-9, abs_tol=1e-12):
            continue
        # A turn that two rows have is trained in the first of them.
        ends = {turn: (int(row), end) for row in rows[::-1] for turn, end in fields["turn_ends"][row]}
        for turn, reward in rewards:
            row, end = ends.get(turn, (last, 0))
            if end and turn != max(ends):
                yield row, end - 1, last, reward


def add_overlong_penalty(scores_B: np.ndarray, data: DataProto, config: OverlongBufferConfig, limit: int) -> None:
    """Takes the penalty of responses near the length limit from their scores; `overlong_reward` becomes a part."""
    if not config.enable:
        return
    length_B = torch.from_numpy(lengths_of(data)[1])
    last_B = torch.from_numpy(last_rows(data))
    # The limit is that of a row, so the longest row of a sample decides; its penalty counts once, with the score.
    length_B = torch.zeros_like(length_B).scatter_reduce_(0, last_B, length_B, "amax")[last_B]
    penalty_B = overlong_penalty(length_B, limit, config.len or max(1, limit // 5), config.penalty_factor)
    placed_B = torch.where(last_B == torch.arange(len(data)), penalty_B, 0.0)
    scores_B += placed_B.to(torch.float32).numpy()
    for part, penalty in zip(data.non_tensor_batch["reward_parts"], penalty_B.tolist(), strict=True):
        part["overlong_reward"] = penalty


NO_REWARD = "it gave no reward, and there is no reward function for these rows"


def feed_turns(
    rewards: RewardManager, loop: ConversationLoop, ended: Sequence[Output], *, failed: float = 0.0, alone: bool = False
) -> None:
    """Whole responses are scored by their agents, or go to the reward function. `failed` is the score where an agent
    failed; `alone` says that agents alone can score."""
    by_agent: list[tuple[Any, RewardResult]] = []
    left: list[Output] = []
    for output in ended:
        result = score_by_agent(loop.records[output.id], failed, alone=alone and loop.has_agents)
        if result is None:
            left.append(output)
        else:
            by_agent.append((output.id, result))
    if by_agent:
        rewards.settle(by_agent)
    facts: dict[Any, Any] = {output.id: reward_info(loop.records[output.id]) for output in left}
    marks: dict[Any, Any] = {output.id: output.written for output in left}
    rewards.feed([(output.id, output.token_ids) for output in left], facts, marks)


def score_by_agent(record: Conversation, failed: float, *, alone: bool = False) -> RewardResult | None:
    """What a conversation earned by its agent; None where that is left to the reward function."""
    error = record.error
    value = record.score
    if error is None and value is None:
        if not alone:
            return None
        value = sum(reward for _, reward in record.turn_rewards) if record.turn_rewards else None
        error = NO_REWARD if value is None else None
    if error is None:
        score, parts, error = read_result(value)
        if error is None:
            return RewardResult(score, parts)
    return RewardResult(failed, error=f"agent: {error}")


class AgentWatch:
    """Ends the run when agents fail on every response."""

    def __init__(self) -> None:
        self._watch = FailureWatch("agent", KEY, "correct it; `posttrain generate` shows what it makes of a prompt")

    def look(self, records: Sequence[Conversation]) -> None:
        """Counts the conversations of a batch in which an agent failed."""
        self._watch.check([record.error and f"agent: {record.error}" for record in records])


MODEL, FUNCTION = "reward_model", "function"


class ModelReward:
    """Joins the scores. `functions` says whether rows have a function's score at all, `named` whether one was named.

    `groups` scores the batches that are trained on group by group, where the model has workers of its own."""

    def __init__(
        self,
        settings: RewardModelConfig,
        worker_group: RewardModelGroup,
        *,
        failure_score: float,
        functions: bool,
        named: bool,
        groups: GroupScores | None = None,
    ) -> None:
        self.worker_group, self.functions, self.groups = worker_group, functions, groups
        self.failure_score, self.weight = failure_score, settings.weight
        # A built-in scorer that nobody asked for only records whether responses are right.
        chosen = settings.function_weight if settings.function_weight is not None else float(named)
        self.function_weight = chosen if functions else 0.0
        self._watch = FailureWatch("reward model", "reward_model.model.path")

    def words(self) -> str:
        """The reward as one sentence."""
        if not self.functions:
            return f"Reward: {self.weight:g} x reward model."
        if self.function_weight == 0:
            return f"Reward: {self.weight:g} x reward model; the function's score is recorded and does not count."
        return f"Reward: {self.weight:g} x reward model + {self.function_weight:g} x function."

    def join(self, batch: DataProto, *, validation: bool = False, at_once: bool = False) -> None:
        """Adds the model's scores to `reward_score`, `reward_parts` and `reward_error`, which the functions gave.

        In validation a function's score stays the score where there is one: it tells what was learned, the model's
        score only how the model likes it. `at_once` scores the batch as one, whoever does it.
        """
        # Of a sample of several rows the last one is scored: its conversation ended there.
        last, scored_B = np.unique(last_rows(batch), return_inverse=True)
        place: list[int] = scored_B.tolist()
        rows = batch if len(last) == len(batch) else batch[last]
        if self.groups is not None:
            scores_B, errors, truncated_B = self.groups.at_once(rows) if at_once else self.groups.of(rows)
        else:
            scores_B, errors, truncated_B = read_scores(self.worker_group.compute_rm_score(rows))
        self._watch.check(errors)
        fields = batch.non_tensor_batch
        for row in range(len(batch)):
            own = float(fields["reward_score"][row]), fields["reward_parts"][row], fields["reward_error"][row]
            score, parts, error = self._row(float(scores_B[place[row]]), errors[place[row]], *own)
            fields["reward_parts"][row], fields["reward_error"][row] = parts, error
            if not (validation and self.functions):
                fields["reward_score"][row] = score
        fields["rm_truncated"] = truncated_B[scored_B]

    def _row(
        self, model: float, model_error: str | None, function: float, parts: dict[str, Any], error: str | None
    ) -> tuple[float, dict[str, Any], str | None]:
        # A part with weight 0 may fail: it is only recorded.
        failed = model_error is not None or (error is not None and self.function_weight != 0)
        total = self.failure_score if failed else self.weight * model + self.function_weight * function
        parts = dict(parts)
        if model_error is None:
            parts[MODEL] = model
        if self.functions and error is None:
            parts[FUNCTION] = function
            parts.setdefault("acc", float(function >= RIGHT))
        texts = [f"{name}: {text}" for name, text in ((MODEL, model_error), (FUNCTION, error)) if text is not None]
        if not is_usable(total):
            texts.append(f"the weighted sum is {total:g}{TOO_LARGE}")
            total = self.failure_score
        return total, parts, "\n".join(texts) or None


def reward_weights(
    reward: RewardConfig, model_reward: ModelReward | None, parts: Sequence[RewardPart] = (), *, named: bool
) -> dict[str, float]:
    """Part -> weight (0: only recorded); empty where a function's own parts decide.

    parts: of function objects that are summed.
    named: whether the user named the function; the parts of a built-in scorer are findings, not rewards.
    """
    functions = {part.name: part.weight for part, _ in read_parts(reward.functions)}
    functions = functions or {part.name: part.weight for part in parts}
    weights = functions or ({} if named else {SCORE: 1.0})
    if model_reward is not None:
        factor = model_reward.function_weight
        inner = {name: factor * weight for name, weight in functions.items()} or {FUNCTION: factor}
        weights = {MODEL: model_reward.weight, **inner}
    buffer = reward.overlong_buffer
    return weights | ({OVERLONG: buffer.penalty_factor} if buffer.enable else {})
