"""The report of an evaluation: `report.json`, its table on the terminal, its samples; two reports compared."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.commands.evaluation.scoring import (
    ALL,
    CONFIDENCE,
    RESAMPLES,
    SEED,
    ScoredPrompt,
    bootstrap,
    keys_of,
    per_prompt,
    sign_flip_p,
    summary,
)
from posttrain.errors import UserError
from posttrain.texts import redact, utf8
from posttrain.tracking.safe_files import replace_file
from posttrain.tracking.samples import sample_table, write_step
from posttrain.tracking.status import installed_versions
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
        "versions": {
            "posttrain": __version__,
            "python": platform.python_version(),
            **installed_versions(("torch", "transformers")),
        },
        "speed": speed,
        "prompts": {
            "key": keys_of(prompts),
            "data_source": [prompt.data_source for prompt in prompts],
            "n": [len(prompt.responses) for prompt in prompts],
            **values,
        },
    }


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """`folder/report.json`, complete or not at all."""
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
    tables = [
        sample_table(step, _batch(prompts[start : start + _AT_ONCE], start))
        for start in range(0, len(prompts), _AT_ONCE)
    ]
    return write_step(folder / "samples", step, pa.concat_tables(tables))


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


_NOT_METRICS = ("key", "data_source", "n")


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per data source and metric, over the prompts that both reports hold; `difference` is second - first."""
    columns = first["prompts"], second["prompts"]
    places = {key: row for row, key in enumerate(columns[1]["key"])}
    pairs = [(row, places[key]) for row, key in enumerate(columns[0]["key"]) if key in places]
    if not pairs:
        raise UserError("The two reports share no prompt: they are of different data (or of different truths).")
    metrics = [name for name in columns[0] if name in columns[1] and name not in _NOT_METRICS]
    sources = columns[0]["data_source"]
    names = list(dict.fromkeys(sources[a] for a, _ in pairs))
    entries = []
    for source in [*names, *([ALL] if len(names) > 1 else [])]:
        rows = [(a, b) for a, b in pairs if source in (ALL, sources[a])]
        for metric in metrics:
            values = [(columns[0][metric][a], columns[1][metric][b]) for a, b in rows]
            entries.append({"data_source": source, "metric": metric, **_difference(values)})
    return entries


def _difference(values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    differences = [b - a for a, b in values]
    count = len(values)
    low, high = bootstrap(differences) if count > 1 else (None, None)
    return {
        "prompts": count,
        "first": sum(a for a, _ in values) / count,
        "second": sum(b for _, b in values) / count,
        "difference": sum(differences) / count,
        "low": low,
        "high": high,
        "p": sign_flip_p(differences),
        "better": sum(d > 0 for d in differences),
        "worse": sum(d < 0 for d in differences),
    }


def notes(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """What else than the model differs between two reports."""
    found = []
    keys = set(first["prompts"]["key"]), set(second["prompts"]["key"])
    if keys[0] != keys[1]:
        found.append(
            f"compared are the {len(keys[0] & keys[1])} prompts that both hold; {len(keys[0] - keys[1])} are only in "
            f"the first, {len(keys[1] - keys[0])} only in the second"
        )
    if first.get("reward") != second.get("reward"):
        found.append(f"the rewards differ: {first.get('reward')}; {second.get('reward')}")
    before, after = first["settings"], second["settings"]
    both = bool(before and after)  # responses that were read have no settings of their own
    for key in sorted({*before, *after} - {"model", "prompts"}):
        if both and before.get(key) != after.get(key):
            found.append(f"{key} differs: {before.get(key)}; {after.get(key)}")
    return found


def compare_files(paths: Sequence[Path]) -> str:
    """The comparison of two report files (or folders) as text."""
    first, second = (read_report(path) for path in paths)
    lines = [f"first   {paths[0]}: {first['model']}", f"second  {paths[1]}: {second['model']}"]
    lines += [f"note: {note}" for note in notes(first, second)]
    head = f"{'data source':<20} {'metric':<10} {'first':>7} {'second':>7}  {'second - first':<28} {'p':>7}"
    lines += ["", f"{head}  better / worse / prompts"]
    name = None
    for entry in compare(first, second):
        shown = "" if entry["data_source"] == name else (name := entry["data_source"])
        difference = f"{entry['difference']:+.3f}"
        difference += "" if entry["low"] is None else f" ({entry['low']:+.3f} .. {entry['high']:+.3f})"
        lines.append(
            f"{shown:<20} {entry['metric']:<10} {entry['first']:>7.3f} {entry['second']:>7.3f}  "
            f"{difference:<28} {entry['p']:>7.4f}  "
            f"{entry['better']} / {entry['worse']} / {entry['prompts']}"
        )
    lines.append(
        f"In brackets the {CONFIDENCE:.0%} interval of the mean difference (bootstrap over prompts); p of a two-sided "
        "paired sign-flip test over prompts."
    )
    return "\n".join(lines)
