"""An evaluation from start to end: responses (made now, or read from a file), scores, report."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.commands.evaluation.report import make_report, write_report, write_samples
from posttrain.commands.evaluation.scoring import ScoredPrompt, Scoring
from posttrain.commands.generation.files import COLUMNS, OF_TURNS, Parts
from posttrain.commands.generation.session import Session, say
from posttrain.commands.generation.settings import Settings
from posttrain.config.trainer import DataConfig
from posttrain.data.fields import PromptFields, fields_of
from posttrain.data.rows import DataError, RowTable
from posttrain.rewards.types import RewardResult
from posttrain.texts import redact


def evaluate_model(model: str, table: RowTable, settings: Settings, out: Path, *, overwrite: bool) -> dict[str, Any]:
    """Answer the rows, score the answers while others are made, and write the report; killed, it continues."""
    with (
        Session(model, table, settings, rewards=True) as session,
        Scoring(settings.config, session.prompts.data_sources, say) as scoring,
        Parts(out / "responses", described := session.described(), overwrite=overwrite) as parts,
    ):
        scoring.check_columns(session.prompts.columns)
        items = {item["index"]: item for item in session.prompts}

        def feed(row: dict[str, Any]) -> None:
            item = items[row["index"]]
            scoring.feed(
                row["index"],
                row["responses"],
                _own_tokens(row),
                data_source=item["data_source"],
                ground_truth=item["ground_truth"],
                extra_info=item["extra_info"],
                asked=item["raw_prompt"][-1]["content"] if session.prompts.prompts_are_texts else item["raw_prompt"],
                token_ids=row["response_ids"],
                more=_facts(row),
                by_agent=[one and json.loads(one) for one in row["agent_scores"] or []],
            )

        # Prompts that an earlier, killed command finished are scored again: only responses are kept on disk.
        for row in parts.table().to_pylist():
            feed(row)
        session.run(parts, lambda item, answers: feed(vars(answers)))
        results = scoring.finish()
        prompts = [_scored_prompt(row, items[row["index"]], scoring, results) for row in parts.table().to_pylist()]
    about = {
        "model": model,
        "engine": session.engine_name,
        "data": {"files": table.files, "rows": len(table), "dropped": session.dropped},
        "reward": scoring.label,
        "config": _config(settings),
    }
    speed = {"responses": session.speed.responses, "tokens": session.speed.tokens, "seconds": session.speed.seconds}
    report = _write(out, prompts, about, described, speed, _step(model))
    parts.remove()
    return report


def _own_tokens(row: dict[str, Any]) -> list[int | None]:
    """How many tokens of each response the model wrote."""
    return [sum(marks) for marks in row["marks"]] if row["marks"] else [len(ids) for ids in row["response_ids"]]


def _facts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts about each multi-turn response that rewards receive, as in a run; empty without tools."""
    if not row["marks"]:
        return []
    columns = zip(row["own_words"], row["num_turns"], row["tool_calls"], row["tool_rewards"], strict=True)
    return [
        {"own_words": words, "num_turns": turns, "tool_calls": len(json.loads(calls)), "tool_reward": reward}
        for words, turns, calls, reward in columns
    ]


def _scored_prompt(row: dict[str, Any], item: Any, scoring: Scoring, results: dict[Any, RewardResult]) -> ScoredPrompt:
    return ScoredPrompt(
        messages=item["raw_prompt"],
        prompt=item["prompt"],
        data_source=scoring.source(item["data_source"]),
        ground_truth=item["ground_truth"],
        responses=row["responses"],
        **_result_columns(results, row["index"], len(row["responses"])),
        finish_reasons=row["finish_reasons"],
        tokens=_own_tokens(row),
        prompt_ids=item["prompt_ids"],
        response_ids=row["response_ids"],
        marks=row["marks"] or [],
        own_words=row["own_words"] or [],
        num_turns=row["num_turns"] or [],
        tool_calls=row["tool_calls"] or [],
    )


def evaluate_responses(
    table: RowTable, settings: Settings, out: Path | None, *, response_key: str | None = None
) -> dict[str, Any]:
    """Score responses that exist already; without `out` nothing is written."""
    answered = answered_prompts(table, settings.config.data, response_key)
    started = time.perf_counter()
    with Scoring(settings.config, {one.fields.data_source for one in answered}, say) as scoring:
        scoring.check_columns({name for one in answered for name in one.fields.extra_info or ()})
        for index, one in enumerate(answered):
            fields = one.fields
            scoring.feed(
                index,
                one.responses,
                one.tokens,
                data_source=fields.data_source,
                ground_truth=fields.ground_truth,
                extra_info=fields.extra_info,
                asked=fields.prompt,
                more=[{"own_words": words} for words in one.own_words],
            )
        results = scoring.finish()
        prompts = []
        for index, one in enumerate(answered):
            prompt = one.fields.prompt
            prompts.append(
                ScoredPrompt(
                    messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                    prompt=prompt if isinstance(prompt, str) else str(prompt[-1].get("content")),
                    data_source=scoring.source(one.fields.data_source),
                    ground_truth=one.fields.ground_truth,
                    responses=one.responses,
                    **_result_columns(results, index, len(one.responses)),
                    finish_reasons=one.finish_reasons,
                    tokens=one.tokens,
                    own_words=one.own_words,
                )
            )
    about = {
        "model": ", ".join(table.files),
        "engine": "",
        "data": {"files": table.files, "rows": len(table), "dropped": 0},
        "reward": scoring.label,
        "config": _config(settings),
    }
    speed = {"responses": 0, "tokens": 0, "seconds": time.perf_counter() - started}
    if out is None:
        return make_report(prompts, about=about, settings={}, speed=speed)
    return _write(out, prompts, about, {}, speed, 0)


def _write(
    out: Path, prompts: list[ScoredPrompt], about: dict[str, Any], settings: dict[str, Any], speed: Any, step: int
) -> dict[str, Any]:
    report = make_report(prompts, about=about, settings=settings, speed=speed)
    write_samples(out, step, prompts)
    write_report(out, report)
    return report


def _result_columns(results: dict[Any, RewardResult], prompt: int, count: int) -> dict[str, Any]:
    found = [results[prompt, number] for number in range(count)]
    return {
        "scores": [one.score for one in found],
        "parts": [dict(one.parts) for one in found],
        "errors": [one.error for one in found],
    }


def _config(settings: Settings) -> dict[str, Any]:
    """The sections of the settings that have an effect on an evaluation, secrets taken out."""
    whole = settings.config.to_dict()
    model = {name: whole["actor_rollout_ref"][name] for name in ("model", "rollout")}
    kept = {name: whole[name] for name in ("data", "reward", "custom_reward_function")}
    return redact({**kept, "actor_rollout_ref": model})


def _step(model: str) -> int:
    found = re.search(r"global_step_(\d+)/?$", model)
    return int(found[1]) if found else 0


SAMPLE_COLUMNS = ("uid", "sample", "branch", "parent", "fork", "score", "finish_reason", "response_ids")


@dataclass
class AnsweredPrompt:
    """A prompt's fields and the responses to it."""

    fields: PromptFields
    responses: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    # With tools: what the model wrote of each response; empty without.
    own_words: list[str] = field(default_factory=list)


def answered_prompts(table: RowTable, config: DataConfig, response_key: str | None = None) -> list[AnsweredPrompt]:
    """The prompts of a file with their responses, in the order of their first rows."""
    key = response_key or ("responses" if "responses" in table.rows[0] else "response")
    groups: dict[Any, AnsweredPrompt] = {}
    # A conversation with branches has a row for each; it ended in the last one, which is the response.
    last = {(row.get("uid"), row.get("sample")): number for number, row in enumerate(table.rows)}
    for number, row in enumerate(table.rows):
        if row.get("branch") is not None and last[row.get("uid"), row.get("sample")] != number:
            continue
        found = row.get(key)
        texts: list[Any] = found if isinstance(found, list) else [found]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{table.where(number).capitalize()} has no responses in its column '{key}'; "
                f"it has: {', '.join(row) or 'no columns'}."
            )
        whole = isinstance(found, list)
        # One response per row: rows of one prompt belong together, or pass@k would be over single responses.
        group = number if whole else row.get("uid") or str(row.get(config.prompt_key))
        if group not in groups:
            groups[group] = AnsweredPrompt(_fields(table, number, config, key))
        one = groups[group]
        one.responses += texts
        written: Any = row.get("own_words") if whole else [row.get("own_words")]
        if (
            isinstance(written, list)
            and len(written) == len(texts)
            and all(isinstance(words, str) for words in written)
        ):
            one.own_words += written
        one.finish_reasons += _column(row, "finish_reasons", "finish_reason", len(texts))
        lengths = _column(row, "response_tokens", "response_ids" if not whole else "", len(texts))
        one.tokens += [len(ids) if isinstance(ids, list) else ids for ids in lengths]
    for one in groups.values():
        if len(one.own_words) < len(one.responses):  # rows of several runs, some without tools
            one.own_words = []
    return list(groups.values())


def _fields(table: RowTable, number: int, config: DataConfig, response_key: str) -> PromptFields:
    # As training sees them: without the columns that generation added.
    of_turns = OF_TURNS if "own_words" in table.rows[number] else ()
    generated = {response_key, *COLUMNS, *of_turns, *(SAMPLE_COLUMNS if response_key == "response" else ())}
    kept = {name: value for name, value in table.rows[number].items() if name not in generated}
    one = RowTable([kept], [0], [table.number_of[number]], [table.files[table.file_of[number]]])
    return fields_of(one, 0, prompt_key=config.prompt_key, data_source=config.data_source)


def _column(row: dict[str, Any], name: str, single: str, count: int) -> list[Any]:
    value = row.get(name)
    if isinstance(value, list) and len(value) == count:
        return value
    value = row.get(single)
    if count != 1 or value is None or value == []:
        return [None] * count
    return [value]
