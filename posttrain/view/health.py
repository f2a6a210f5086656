"""The health of a run: advice with its metric, failures of the reward with their inputs, stages in time, planned memory
of each stage."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from posttrain.tracking.rundir import DIAGNOSIS, TIMELINE, read_lines
from posttrain.tracking.safe_files import read_settings
from posttrain.tracking.step_line import error_kind
from posttrain.view.catalogue import Catalogue
from posttrain.view.samples import SampleFile, preview

# The metric of an advice by its words, for lines of diagnosis.jsonl that have only texts.
METRIC_OF = {
    r"rewards are (all )?0": "reward_mean",
    r"reward failed": "reward/failures",
    r"equal rewards": "groups/no_signal",
    r"reward fell": "reward_mean",
    r"not finite": "actor/bad_steps",
    r"tokens are clipped": "actor/pg_clipfrac",
    r"gradient norm": "actor/grad_norm",
    r"kl_loss": "kl_loss",
    r"Responses (grew|shrank)": "response_length",
    r"cut off": "response_length/clip_ratio",
    r"entropy": "actor/entropy",
}
TIMELINE_STEPS = 40


def diagnosis(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Advice of all steps: (step, text, the metric behind it, its rule)."""
    found = []
    for line in read_lines(folder / DIAGNOSIS):
        step, said = line.get("step"), line.get("advice")
        if not isinstance(step, int) or not isinstance(said, list):
            continue
        for advice in said:
            about = advice if isinstance(advice, dict) else {"text": advice}
            text, rule, named = str(about.get("text", "")), about.get("rule"), about.get("metric")
            metric = named if isinstance(named, str) and named else _metric_of(text, names)
            found.append(
                {"step": step, "text": text, "metric": metric, "rule": rule if isinstance(rule, str) else None}
            )
    return found


def _metric_of(text: str, names: list[str]) -> str | None:
    named = [name for name in names if "/" in name and name in text]
    if named:
        return max(named, key=len)
    return next((metric for words, metric in METRIC_OF.items() if re.search(words, text)), None)


def failures(catalogue: Catalogue) -> dict[str, Any]:
    """Errors of the reward by kind: how many, and the newest response of each with its inputs."""
    found = catalogue.find("failed")
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for step, rows in _by_step(found["found"]).items():
        try:
            file = SampleFile(catalogue.folder / "samples" / f"{catalogue.kind}_{step}.parquet")
            texts = file.take(rows, ("uid", "sample", "error", "prompt", "response", "ground_truth"))
        except (OSError, pa.ArrowException):
            continue
        for one in texts:
            newest = {"error": one["error"], "count": 0, "step": step, **_inputs(one)}
            kind = kinds.setdefault(error_kind(one["error"] or ""), newest)
            kind["count"] += 1
    ordered = sorted(kinds.values(), key=lambda kind: -kind["count"])
    return {"kinds": ordered, "count": found["count"], "read": found["read"], "files": found["files"]}


def _by_step(found: list[dict[str, Any]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for one in found:
        rows.setdefault(one["step"], []).append(one["row"])
    return rows


def _inputs(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "uid": row["uid"],
        "sample": row["sample"],
        "prompt": preview(row["prompt"]),
        "response": preview(row["response"]),
        "ground_truth": preview(row["ground_truth"]),
    }


def timeline(folder: Path, last: int | None = None) -> dict[str, Any]:
    """When the stages of some steps began and how long they took, up to step `last` or the newest."""
    lines = [line for line in read_lines(folder / TIMELINE) if isinstance(line.get("step"), int)]
    kept = [line for line in lines if last is None or line["step"] <= last][-TIMELINE_STEPS:]
    steps = [{"step": line["step"], "stages": _spans(line.get("stages"))} for line in kept]
    return {"steps": steps, "range": [lines[0]["step"], lines[-1]["step"]] if lines else None}


def _spans(stages: Any) -> list[list[Any]]:
    # [stage, start, seconds, perhaps the worker]; anything else in the file is ignored.
    return [span[:4] for span in stages if _is_span(span)] if isinstance(stages, list) else []


def _is_span(span: Any) -> bool:
    if not isinstance(span, list) or len(span) < 3 or not isinstance(span[0], str):
        return False
    return all(isinstance(value, int | float) and math.isfinite(value) for value in span[1:3]) and all(
        isinstance(worker, str | int | None) for worker in span[3:4]
    )


# Stage of the plan -> the stages of a run that it covers.
MEASURED = {
    "generate": ("gen",),
    "log-probs": ("old_log_prob", "ref", "values", "reward_model"),
    "update": ("update_actor", "update_critic"),
}


class NoPlan(LookupError):
    """These settings cannot be planned for here; the message says why."""


def planned_memory(folder: Path) -> dict[str, Any]:
    """Planned GB by stage, with the run's stages that each covers. Loads torch, but no weights."""
    from posttrain.config import load_config
    from posttrain.errors import UserError
    from posttrain.planning.budgets import apply_plan, planner_for
    from posttrain.planning.memory_plan import find_device

    try:
        tree = read_settings(folder / "config.yaml")
        if "actor_rollout_ref" not in tree:
            raise NoPlan("Only runs of the PPO family are planned here; `posttrain plan sft ...` plans others.")
        resolved = load_config(_without_model_code(tree))
        config, device, planner = resolved.config, find_device(resolved.config), planner_for(resolved.config)
        apply_plan(config, device, resolved.explicit, planner)
        found = planner.plan(config, device)
    except (UserError, OSError, TypeError) as error:
        raise NoPlan(f"This run cannot be planned here: {error}") from error
    stages = [
        {"stage": stage, "gb": found.peak(stage) / 1e9, "measured": MEASURED.get(stage, ())} for stage in found.stages
    ]
    words = (
        f"Planned for {found.device.words}: the tensors that the run makes. Measured on a CPU is all that the process "
        "held, torch itself among it."
    )
    return {"words": words, "stages": stages, "peak_gb": found.peak() / 1e9}


def _without_model_code(tree: Any) -> Any:
    # Viewing another user's run must not execute the code that comes with its model.
    if not isinstance(tree, dict):
        return tree
    return {key: False if key == "trust_remote_code" else _without_model_code(value) for key, value in tree.items()}
