"""What a measurement is worth nothing without: machine, versions, command, date; and the JSON file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.bench.chips import Place
from posttrain.errors import UserError
from posttrain.tracking.atomic import replace_file


def circumstances(threads: int, place: Place | None = None) -> dict[str, Any]:
    """Everything about here and now that a reader of the figures needs."""
    return {
        "command": " ".join(["posttrain", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "posttrain": __version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
        **(place or Place("cpu")).as_json(),
    }


def cpu_name() -> str:
    """The CPU's name, family and model: a virtual machine often has no telling name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    kinds = [kind for kind in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if kind in facts.get("flags", "").split()]
    return f"{name}, family {facts.get('cpu family')} model {facts.get('model')} ({', '.join(kinds)})"


def default_threads() -> int:
    return len(os.sched_getaffinity(0))


def writable(path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before anything is measured."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise UserError(f"{path}: not a file that can be written; its folder must exist")
    return path


def write_json(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--from {path}: {error}; give a file that --json wrote") from None
