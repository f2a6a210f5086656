#!/usr/bin/env python3
"""Reward and accuracy against the wall clock, here and in TRL: smollm_curves.py OUT RUN_FOLDER... TRL_FOLDER...

Takes run folders of scripts/smollm_gsm8k.sh (metrics.jsonl) and folders of scripts/smollm_trl.py (curve.json, and
step_N/eval/report.json of `posttrain eval`); writes OUT.json and OUT.svg and prints a table. Seconds count from the
first step's beginning, what validation took is left out, and rewards are drawn as means of five steps.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.tracking.curve import line_chart
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.safe_files import replace_file

ACCURACY = "val/gsm8k/mean@1"
SMOOTH = 5

Curve = dict[str, Any]


def ours(folder: Path) -> Curve:
    """A run of posttrain: its lines carry the time at which they were written."""
    lines = list(read_metrics(folder / "metrics.jsonl"))
    first = next(line for line in lines if line["step"] == 1)
    before = next((line for line in lines if line["step"] == 0), None)
    began, aside, steps = before["time"] if before else first["time"] - first["timing_s/step"], 0.0, []
    for line in lines:
        aside += line.get("timing_s/validation", 0.0) if line["step"] else 0.0
        found = {"step": line["step"], "seconds": line["time"] - began - aside, "reward": line.get("reward_mean")}
        steps.append({**found, "accuracy": line.get(ACCURACY)})
    return {"name": f"posttrain, {folder.name}", "steps": steps}


def of_trl(folder: Path) -> Curve:
    """Accuracies are those of the weights that were kept; before the first step they are nobody's own."""
    found = json.loads((folder / "curve.json").read_text())
    for line in found["steps"]:
        report = folder / f"step_{line['step']}" / "eval" / "report.json"
        if report.is_file():
            line["accuracy"] = json.loads(report.read_text())["results"]["gsm8k"]["metrics"]["accuracy"]["value"]
    return found


def read(folder: Path) -> Curve:
    return of_trl(folder) if (folder / "curve.json").is_file() else ours(folder)


def smooth(values: list[float]) -> list[float]:
    """The mean of a value and up to four before it."""
    return [statistics.fmean(values[max(0, end - SMOOTH) : end]) for end in range(1, len(values) + 1)]


def points(curve: Curve, key: str) -> tuple[list[float], list[float]]:
    known = [line for line in curve["steps"] if line.get(key) is not None]
    return [line["seconds"] for line in known], [line[key] for line in known]


def picture(curves: list[Curve]) -> str:
    """Two charts side by side over the same seconds."""
    rewards = {c["name"]: (points(c, "reward")[0], smooth(points(c, "reward")[1])) for c in curves}
    accuracies = {c["name"]: points(c, "accuracy") for c in curves if points(c, "accuracy")[0]}
    charts = [line_chart(rewards, title="mean reward while training (of 5 steps)", x_label="seconds")]
    if accuracies:
        charts.append(line_chart(accuracies, title="greedy accuracy on the test set", x_label="seconds"))
    placed = [chart.replace("<svg ", f'<svg x="{720 * number}" ', 1) for number, chart in enumerate(charts)]
    width = 720 * len(charts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 400" width="{width}" height="400">\n'
    return head + "".join(placed) + "</svg>\n"


def main(out: str, *folders: str) -> None:
    curves = [read(Path(folder)) for folder in folders]
    begun = [line.get("accuracy") for curve in curves for line in curve["steps"] if not line["step"]]
    started = [value for value in begun if value is not None]
    for curve in curves:
        if started and curve["steps"][0]["step"]:  # all begin with the same weights
            curve["steps"].insert(0, {"step": 0, "seconds": 0.0, "accuracy": statistics.fmean(started)})
        steps = [later["seconds"] - one["seconds"] for one, later in pairwise(curve["steps"])]
        print(f"{curve['name']}: {len(steps)} steps, {statistics.median(steps):.2f} s a step (median)")
        for line in curve["steps"]:
            if line.get("accuracy") is not None:
                print(f"  step {line['step']:3d} at {line['seconds']:6.1f} s: accuracy {line['accuracy']:.4f}")
    replace_file(Path(f"{out}.json"), (json.dumps(curves, indent=1) + "\n").encode())
    replace_file(Path(f"{out}.svg"), picture(curves).encode())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
