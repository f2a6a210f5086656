"""Two small files of a run: status.json, how it stands now, and run.json, how each start of it was made.

status.json is for people, for `posttrain runs`, and for the next start of the same run. run.json has command, versions
and machine: settings alone do not reproduce a run, the same ones give other numbers with another torch or GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.cores import machine_memory, usable
from posttrain.errors import working_folder
from posttrain.texts import MASK, is_secret, redact
from posttrain.tracking.progress import Moment
from posttrain.tracking.safe_files import DamagedFile, read_object, replace_file

FRESH_S = 2.0  # a running run writes its status this often
STATUS_FILE = "status.json"
# Types of the values; a file may have been edited or cut off.
KINDS: dict[str, type] = {
    **dict.fromkeys(("status", "stage", "unit", "time", "host"), str),
    **dict.fromkeys(("step", "total_steps", "pid"), int),
    **dict.fromkeys(("stage_seconds", "done", "of", "tokens", "tokens_per_s"), float),
    **dict.fromkeys(("stage_seconds_left", "seconds_left"), float),
}


def write_status(folder: Path, status: str, step: int, total_steps: int, moment: Moment | None = None) -> None:
    """Write the state (`running`, `stopped`, `failed` or `finished`), the progress, the time and the process."""
    known: dict[str, Any] = {
        "status": status,
        "step": step,
        "total_steps": total_steps,
        "stage": None,
        **(_moment(moment) if moment else {}),
        # Time, process and machine let a reader tell a run that works from one that was killed and could not say so.
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "pid": os.getpid(),
        "host": platform.node(),
    }
    replace_file(folder / STATUS_FILE, (json.dumps(known, ensure_ascii=False) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """What a run wrote last; empty if nothing is readable."""
    try:
        return load_status(folder)
    except DamagedFile:
        return {}


def load_status(folder: Path) -> dict[str, Any]:
    """What a run wrote last, every value of its type; empty before it wrote anything. DamagedFile if it is broken."""
    try:
        found = read_object(folder / STATUS_FILE)
    except FileNotFoundError:
        return {}
    for key, kind in KINDS.items():
        value = found.get(key)
        if value is not None and not _has_type(value, kind):
            raise DamagedFile(
                f"{STATUS_FILE}: `{key}` is {str(value)[:40]!r}, not a {'text' if kind is str else 'number'}."
            )
    return found


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, str) if kind is str else isinstance(value, (int, kind)) and not isinstance(value, bool)


def run_state(folder: Path) -> str:
    """The state in one word: `killed` if the process of a running run is gone, `silent` if it stopped writing."""
    known = read_status(folder)
    status = str(known.get("status", "unknown"))
    # A process id means something on its own machine only; on a shared disk the age of the file has to serve.
    if status == "running" and known.get("host") == platform.node() and not _is_alive(known.get("pid")):
        return "killed"
    if status == "running" and age(known) > 60 * FRESH_S:
        return "silent"
    return status


def age(known: dict[str, Any]) -> float:
    """Seconds since a status was written; 0 if it does not say."""
    try:
        return max(0.0, time.time() - datetime.fromisoformat(known["time"]).timestamp())
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return True  # unknown: older versions wrote no pid
    try:
        # Signal 0 is not delivered: it only asks whether the process exists. No permission means that it does.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _moment(moment: Moment) -> dict[str, Any]:
    work = moment.work
    known: dict[str, Any] = {"stage": moment.stage, "stage_seconds": round(moment.stage_seconds, 1)}
    if work is not None:
        left = work.seconds_left
        known |= {
            "unit": work.unit,
            "done": work.shown,
            "of": work.total,
            "tokens": work.all_tokens,
            "tokens_per_s": round(work.all_tokens / max(work.seconds, 1e-9), 1),
            "stage_seconds_left": None if left is None else round(left, 1),
        }
    left = moment.seconds_left
    return known | {"seconds_left": None if left is None else round(left, 1)}


ORIGIN_FILE = "run.json"
# Packages whose versions change what a run computes or how fast.
PACKAGES = (
    *("posttrain", "torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors", "peft"),
    *("accelerate", "flash-attn", "triton", "vllm", "sglang", "megatron-core", "ray"),
)
MOST_STARTS = 20  # a run that is started again and again keeps its first start and the newest ones


def write_origin(folder: Path, step: int) -> None:
    """Add this start, which continues from `step`, to the run's `run.json`."""
    starts = [*read_origin(folder), {"step": step, **origin()}]
    kept = starts if len(starts) <= MOST_STARTS else [starts[0], *starts[1 - MOST_STARTS :]]
    replace_file(folder / ORIGIN_FILE, (json.dumps({"starts": kept}, indent=1, ensure_ascii=False) + "\n").encode())


def read_origin(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty if there is no readable file."""
    try:
        starts = read_object(folder / ORIGIN_FILE).get("starts")
    except (FileNotFoundError, DamagedFile):
        return []
    return [redact(start) for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def origin() -> dict[str, Any]:
    """Facts about this process and this machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "folder": str(working_folder()),
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **_own_versions(PACKAGES)},
        "hardware": describe_hardware(),
    }


def command(arguments: Sequence[str]) -> str:
    """The command line as it can be repeated, without secrets."""
    kept, secret_next = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        secret = is_secret(name)
        if secret_next and not argument.startswith("-"):
            kept.append(MASK)
        elif secret and equals and value:
            kept.append(f"{name}={MASK}")
        else:
            kept.append(redact(argument))
        secret_next = secret and not equals and argument.startswith("-")
    return shlex.join(kept)


def cpu_name() -> str:
    """The CPU's name, family and model: in a virtual machine the name alone says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name", platform.machine())
    kinds = [kind for kind in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if kind in facts.get("flags", "").split()]
    return f"{name}, family {facts.get('cpu family')} model {facts.get('model')} ({', '.join(kinds)})"


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version by name of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


_own_versions = cache(installed_versions)  # reading them takes 30 ms, and a process may train several times


def describe_machine() -> dict[str, Any]:
    """The machine's system, CPU, usable cores and memory."""
    return {
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable(),
        "memory_gib": round(machine_memory() / 2**30, 1),
    }


def describe_hardware() -> dict[str, Any]:
    found = describe_machine()
    torch = sys.modules.get("torch")  # a process that trains has imported it; others need not
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["gpus"] = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
        found["cuda"] = torch.version.cuda
    return found
