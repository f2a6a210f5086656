"""Other Python interpreters: packages that do not fit together with the trainer's run in one of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys


def find_missing(python: str | None, package: str) -> str | None:
    """Why a package cannot be used in an interpreter (None: this one); None if it can."""
    python = python or sys.executable
    if shutil.which(python) is None:
        return f"there is no interpreter {python}"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    if subprocess.run([python, "-c", look, package]).returncode:
        return f"{python} does not have the package {package}"
    return None
