"""What a script needs beside posttrain and may not find: said at once, with what to do."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def need(*packages: str, get: str) -> None:
    """End the script where one of these packages is not installed; `get` says how to get them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        name = Path(sys.argv[0]).name
        sys.exit(f"{name} needs {' and '.join(missing)}, not installed in {sys.prefix}\n  to do:  {get}")
