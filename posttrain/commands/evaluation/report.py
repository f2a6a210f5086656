"""The report of an evaluation: `report.json`, the table on the terminal, and the samples behind them."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.commands.evaluation.scored import ScoredPrompt, keys_of, per_prompt, summary
from posttrain.commands.evaluation.statistics import CONFIDENCE, RESAMPLES, SEED
from posttrain.errors import UserError
from posttrain.texts import utf8
from posttrain.tracking.atomic import replace_file
from posttrain.tracking.redact import redact
from posttrain.tracking.samples import sample_table
from posttrain.version import __version__

FORMAT = 1
NAME = "report.json"
_AT_ONCE = 256  # prompts that are padded to one width


def make_report(
    prompts: Sequence[ScoredPrompt], *, about: dict[str, Any], settings: dict[str, Any], speed: dict[str, float]
) -> dict[str, Any]:
    """Everything that is known, as plain values."""
    values = per_prompt(prompts)
    return {
        "format": FORMAT,
        **about,
        "settings": redact(settings),
        "results": summary(prompts, values),
        "intervals": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED, "unit": "prompt"},
        "versions": _versions(),
        "speed": speed,
        "prompts": {
            "key": keys_of(prompts),
            "data_source": [prompt.data_source for prompt in prompts],
            "n": [len(prompt.responses) for prompt in prompts],
            **values,
        },
    }


def _versions() -> dict[str, str]:
    found = {"posttrain": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """`folder/report.json`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / NAME, utf8(json.dumps(report, indent=1, ensure_ascii=False)) + b"\n")
    return folder / NAME


def read_report(path: Path) -> dict[str, Any]:
    """A report from its file or its folder."""
    file = path / NAME if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no report {file}. `posttrain eval` writes one into the folder of --out.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a report: {error}. `posttrain eval` writes them.") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT or "prompts" not in report:
        raise UserError(f"{file} is no report of `posttrain eval` (format {FORMAT}).")
    return report


def write_samples(folder: Path, step: int, prompts: Sequence[ScoredPrompt]) -> Path:
    """`folder/samples/step_N.parquet`, in the form of a run's samples: one row per response."""
    path = folder / "samples" / f"step_{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [
        sample_table(step, _batch(prompts[start : start + _AT_ONCE], start))
        for start in range(0, len(prompts), _AT_ONCE)
    ]
    replace_file(path, lambda file: pq.write_table(pa.concat_tables(tables), file, compression="zstd"))
    return path


def _batch(prompts: Sequence[ScoredPrompt], first: int) -> dict[str, Any]:
    rows = [(f"eval-{first + i}", prompt, j) for i, prompt in enumerate(prompts) for j in range(len(prompt.responses))]
    ids = [prompt.response_ids[j] if prompt.response_ids else [] for _, prompt, j in rows]
    asked = [prompt.prompt_ids for _, prompt, _ in rows]
    width, asked_width = max(1, *map(len, ids)), max(map(len, asked))
    responses, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    prompt_ids, present = np.zeros((len(rows), asked_width), np.int64), np.zeros((len(rows), asked_width), np.int64)
    marks = [prompt.marks[j] if prompt.marks else None for _, prompt, j in rows]
    real = np.zeros_like(mask)
    for row, (one, before) in enumerate(zip(ids, asked, strict=True)):
        responses[row, : len(one)], mask[row, : len(one)], real[row, : len(one)] = one, marks[row] or 1, 1
        prompt_ids[row, asked_width - len(before) :], present[row, asked_width - len(before) :] = before, 1
    scores = np.zeros((len(rows), width))
    scores[:, 0] = [prompt.scores[j] for _, prompt, j in rows]
    return {
        "responses": responses,
        "response_mask": mask,
        "prompts": prompt_ids,
        "attention_mask": np.concatenate([present, real], axis=1),
        "token_level_scores": scores,
        "uid": [uid for uid, _, _ in rows],
        "data_source": [prompt.data_source for _, prompt, _ in rows],
        "prompt": [prompt.prompt for _, prompt, _ in rows],
        "response": [prompt.responses[j] for _, prompt, j in rows],
        "ground_truth": [prompt.ground_truth for _, prompt, _ in rows],
        "reward_parts": [prompt.parts[j] for _, prompt, j in rows],
        "reward_error": [prompt.errors[j] for _, prompt, j in rows],
        "finish_reason": [prompt.finish_reasons[j] for _, prompt, j in rows],
        "num_turns": [prompt.num_turns[j] if prompt.num_turns else None for _, prompt, j in rows],
        "tool_calls": [prompt.tool_calls[j] if prompt.tool_calls else None for _, prompt, j in rows],
        "own_words": [prompt.own_words[j] if prompt.own_words else None for _, prompt, j in rows],
    }


def table(report: dict[str, Any]) -> str:
    """The results as lines for a terminal."""
    lines = [f"{'data source':<20} {'metric':<10} {'value':>7}   {CONFIDENCE:.0%} interval    by"]
    for source, found in report["results"].items():
        name = source
        for metric, entry in found["metrics"].items():
            interval = "-" if entry["low"] is None else f"{entry['low']:.3f} .. {entry['high']:.3f}"
            lines.append(f"{name:<20} {metric:<10} {entry['value']:>7.3f}   {interval:<15} {entry['interval']}")
            name = ""
        lines.append(f"{'':<20} {_facts(found)}")
    return "\n".join(lines)


def _facts(found: dict[str, Any]) -> str:
    facts = [f"{found['prompts']} prompts, {found['responses']} responses"]
    if found["truncated"] is not None:
        facts.append(f"truncated {found['truncated']:.1%}")
    if found["mean_length"] is not None:
        facts.append(f"mean length {found['mean_length']:.1f} tokens")
    if found["without_answer"] is not None:
        facts.append(f"without an answer {found['without_answer']:.1%}")
    if found["reward_failures"]:
        facts.append(f"! {found['reward_failures']} scores failed")
    return ", ".join(facts)
