"""Two reports, prompt by prompt: the difference of each metric with its interval, and a paired test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.commands.evaluation.report import read_report
from posttrain.commands.evaluation.scored import ALL
from posttrain.commands.evaluation.statistics import CONFIDENCE, bootstrap, sign_flip_p
from posttrain.errors import UserError

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
