"""What a sweep found, as tables and as the panels of its picture."""

from __future__ import annotations

from typing import Any

from posttrain.bench.pictures import Panel
from posttrain.bench.table import render
from posttrain.bench.workload import Point

AXES = ("rows", "length", "model")

TITLES = {"rows": "by rows decoded side by side", "length": "by length of the response", "model": "by model"}


def table(by: str, points: list[Point]) -> str:
    """One line per point, with the number of times the floor."""
    head = ["rows", "tokens", "us/token", "tok/s", "floor us", "x floor"]
    lines = [
        [
            str(point["rows"]),
            str(point["tokens"]),
            f"{point['us_per_token']:.1f}",
            f"{1e6 / point['us_per_token']:,.0f}",
            f"{point['floor_us']:.2f}",
            f"{point['us_per_token'] / point['floor_us']:.1f}",
        ]
        for point in points
    ]
    if by == "model":
        head, lines = ["model", *head], [[p["model"], *line] for p, line in zip(points, lines, strict=True)]
    last = [(p["tokens"], p["prefix"] + p["made"], p["timed"]) for p in points if "prefix" in p]
    notes = [f"of {tokens} those from {end - timed:.0f} to {end}" for tokens, end, timed in last]
    under = f"\nby tokens in the middle of a row: {', '.join(notes)}" if notes else ""
    return f"{TITLES[by]}\n{render(head, lines, left=())}{under}"


def panels(found: dict[str, Any]) -> list[Panel]:
    """One for each axis that was swept; points with other rows than their neighbours have words."""
    made = []
    for by, key in (("rows", "rows"), ("length", "tokens"), ("model", "parameters")):
        points = found.get(f"by_{by}")
        if not points:
            continue
        first = points[0]
        label = {
            "rows": f"rows decoded side by side (responses of {first['tokens']} tokens)",
            "length": f"tokens per response ({first['rows']} rows side by side)",
            "model": f"parameters ({first['rows']} rows x {first['tokens']} tokens)",
        }[by]
        marks = [f"{p['rows']} rows" if by == "length" and p["rows"] != first["rows"] else "" for p in points]
        made.append(Panel(points, key, label, marks, [p["model"] for p in points] if by == "model" else None))
    return made


def title(found: dict[str, Any]) -> str:
    return f"{found['model']} in {found['models'][found['model']]['dtype']}"


def report(found: dict[str, Any]) -> str:
    """Where it was measured, and a table for each axis."""
    model = found["models"][found["model"]]
    machine, bandwidth = model["machine"], {int(size): rate for size, rate in model["machine"]["bandwidth"].items()}
    sizes = ", ".join(f"{size >> 20} MiB {rate / 1e9:.0f}" for size, rate in bandwidth.items() if size > 1)
    rates = f"GB/s read by size: {sizes}" if sizes else f"{bandwidth[1] / 1e9:,.0f} GB/s by its data sheet"
    where = found.get("gpu") or f"{found['cpu']}; {found['threads']} threads"
    head = (
        f"\n{found['engine']}, {title(found)}; {where}; load before {found['load_before'][0]}\n"
        f"this machine: {machine['peak_flops'] / 1e9:,.0f} GFLOP/s in {model['dtype']}; {rates}\n"
    )
    return "\n\n".join([head, *(table(by, points) for by in AXES if (points := found.get(f"by_{by}")))])
