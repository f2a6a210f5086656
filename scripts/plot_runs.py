#!/usr/bin/env python3
"""Draws one metric of several runs as an SVG: python scripts/plot_runs.py OUT.svg METRIC RUN_FOLDER [RUN_FOLDER ...]"""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.tracking.curve import write_chart
from posttrain.tracking.loggers import read_metrics


def main(out: str, metric: str, *runs: str) -> None:
    series = {}
    for run in map(Path, runs):
        lines = [line for line in read_metrics(run / "metrics.jsonl") if metric in line]
        steps, values = [line["step"] for line in lines], [line[metric] for line in lines]
        series[run.name] = (steps, values)
        print(f"{run.name}: " + " ".join(f"{step}:{value:.3f}" for step, value in zip(steps, values, strict=True)))
    write_chart(out, series, title=metric, x_label="step", y_label=metric)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
