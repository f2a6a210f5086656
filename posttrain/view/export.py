"""One HTML file of some runs: all metrics, settings and advice, and as many samples as fit.

Styles, scripts and answers are embedded; its content security policy forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.tracking.safe_files import replace_file
from posttrain.view.answers import Answers, NotFound
from posttrain.view.server import SCRIPT, static_file, to_json

_STYLES = re.compile(r'<link rel="(?:stylesheet|preload)"[^>]*>\n')
_SCRIPTS = re.compile(r"<script [^>]*></script>\n")


def one_file(embedded: dict[str, Any]) -> str:
    """The whole page with these answers in place of a server."""
    page = static_file("index.html").decode()
    style = "\n".join(static_file(name).decode() for name in ("uplot.min.css", "style.css"))
    charts, code = static_file("uplot.min.js").decode(), static_file(SCRIPT).decode()
    policy = (
        f"default-src 'none'; script-src {_source_hash(charts)} {_source_hash(code)}; style-src {_source_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(embedded, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    tail = (
        f'<script type="application/json" id="embedded">{data}</script>\n<script>{charts}</script>\n'
        f'<script type="module">{code}</script>\n'
    )
    page = _SCRIPTS.sub("", _STYLES.sub("", page))
    page = page.replace("</head>", head + "</head>").replace("</body>", tail + "</body>")
    return page.encode("utf-8", "replace").decode()


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Samples in one file, shared by its runs: so much opens quickly and can be sent by mail.
SAMPLE_BYTES = 15_000_000
# Of one run: steps with samples, spread evenly from the first to the last, and groups of each step.
STEPS, GROUPS = 12, 16


def export(answers: Answers, path: Path) -> Path:
    names = list(answers.runs.folders())
    held: dict[str, Any] = {"runs": answers.answer("runs", {})}
    for name in names:
        held |= _run(answers, name, SAMPLE_BYTES // len(names))
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = one_file({"answers": held, "note": f"exported {day}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode())
    return path


def _run(answers: Answers, run: str, room: int) -> dict[str, Any]:
    whole = answers.answer("metrics", {"run": run})
    every = answers.answer("metrics", {"run": run, "names": ",".join(whole["names"])})
    held = {key("metrics", run=run): every, key("config", run=run): answers.answer("config", {"run": run})}
    for name in ("diagnosis", "timeline", "details", "explain"):
        held[key(name, run=run)] = answers.answer(name, {"run": run})
    answers.read_all(run)
    held[key("failures", run=run)] = answers.answer("failures", {"run": run})
    held[key("steps", run=run, learn=1)] = kept = {"step": [], "val": []}
    for kind, step, found in _steps(answers, run, room):
        kept[kind].append(step)
        held |= found
    for steps in kept.values():
        steps.sort()
    return held


def _steps(answers: Answers, run: str, room: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    # (kind, step, its answers) of the newest, the first and those between, until there is no more room.
    available = answers.answer("steps", {"run": run})
    wanted = [("val", step) for step in pick_evenly(available["val"], 3)] + [
        ("step", step) for step in pick_evenly(available["step"], STEPS)
    ]
    for kind, step in sorted(wanted, key=lambda one: -one[1]):
        try:
            found = _step(answers, run, kind, step)
        except NotFound:
            continue  # thinned meanwhile
        room -= len(to_json(found))
        if room < 0:
            return
        yield kind, step, found


def _step(answers: Answers, run: str, kind: str, step: int) -> dict[str, Any]:
    where = {"run": run, "step": step} | ({"kind": "val"} if kind == "val" else {"kind": "step"})
    asked = {name: str(value) for name, value in where.items()}
    groups = answers.answer("groups", asked)[:GROUPS]
    held = {key("groups", **where): groups}
    for group in groups:
        one = asked | {"uid": group["uid"]}
        held[key("group", **where, uid=group["uid"])] = found = answers.answer("group", one)
        for response in found["responses"]:
            place = {name: response[name] for name in ("sample", "branch") if response[name] is not None}
            tokens = answers.answer("response", one | {name: str(value) for name, value in place.items()})
            held[key("response", **where, uid=group["uid"], **place)] = tokens
    return held


def pick_evenly(steps: list[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def key(name: str, **query: Any) -> str:
    """As the page spells a question to an exported file."""
    return name + "?" + "&".join(f"{field}={value}" for field, value in sorted(query.items()))
