"""Which code a process that the bench starts runs: where Python finds a package there."""

from __future__ import annotations

import os
import site
import subprocess
from collections.abc import Mapping
from pathlib import Path

import posttrain

HERE = Path(posttrain.__file__).resolve().parent
_FIND = """
import importlib.util, os, sys
sys.path = [path for path in sys.path if path]  # less the working folder, where a script does not look
found = importlib.util.find_spec(sys.argv[1])
print(os.path.realpath(os.path.dirname(found.origin)) if found and found.origin else "")
"""


def of_this_bench() -> dict[str, str]:
    """Variables with which `python -m` runs the code that runs here, whatever stands in the working folder, where it
    would look first."""
    root, given = str(HERE.parent), os.environ.get("PYTHONPATH")
    installed = root in (*site.getsitepackages(), site.getusersitepackages())  # found anyway, behind Python's own
    paths = [path for path in (None if installed else root, given) if path]
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def folder_of(package: str, python: str, variables: Mapping[str, str]) -> str | None:
    """Where that Python would import the package from; None if it has none. OSError if it cannot be started."""
    command = [python, "-c", _FIND, package]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
