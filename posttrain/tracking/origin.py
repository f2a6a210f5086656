"""run.json: command, versions and machine of each start of a run.

Settings alone do not reproduce a run: the same ones give other numbers with another torch or on another GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.cores import machine_memory, usable
from posttrain.errors import working_folder
from posttrain.texts import HIDDEN, redact
from posttrain.tracking.safe_files import DamagedFile, read_object, replace_file

NAME = "run.json"
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
    replace_file(folder / NAME, (json.dumps({"starts": kept}, indent=1, ensure_ascii=False) + "\n").encode())


def read_origin(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; empty if there is no readable file."""
    try:
        starts = read_object(folder / NAME).get("starts")
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
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": describe_hardware(),
    }


def command(arguments: Sequence[str]) -> str:
    """The command line as it can be repeated, without secrets."""
    kept, secret_next = [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        plain = name.lstrip("+-").replace("-", "_")
        is_secret = redact({plain: "x"})[plain] == HIDDEN
        if secret_next and not argument.startswith("-"):
            kept.append(HIDDEN)
        elif is_secret and equals and value:
            kept.append(f"{name}={HIDDEN}")
        else:
            kept.append(redact(argument))
        secret_next = is_secret and not equals and argument.startswith("-")
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


@cache  # reading them takes 30 ms, and a process may train several times
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def describe_machine() -> dict[str, Any]:
    """Its system, CPU, usable cores and memory."""
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
