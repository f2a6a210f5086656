"""Says which of pyproject.toml's requirements this interpreter lacks: one line each, status 1 if there are any.

    python scripts/requirements.py [EXTRA ...]      e.g. `dev`

Runs on a bare Python 3.11 and imports none of the packages it looks for, so it answers in a fraction of a second.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
IMPORT_NAMES = {"hydra-core": "hydra", "pytest-xdist": "xdist"}  # other than `-` as `_`
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(.*)$")
BOUND = re.compile(r"^(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)$")


def compare(left: str, right: str) -> int:
    """-1, 0 or 1 by the numbers of two releases; a suffix such as `+cpu` or `rc1` does not count."""
    for a, b in zip_longest(_numbers(left), _numbers(right), fillvalue=0):
        if a != b:
            return -1 if a < b else 1
    return 0


def _numbers(version: str) -> list[int]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return [int(part) for part in release.group().split(".")] if release else []


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds such as `>=2.11,<2.14`."""
    for bound in filter(None, (text.strip() for text in bounds.split(","))):
        match = BOUND.match(bound)
        if match is None:
            raise SystemExit(f"{PYPROJECT}: scripts/requirements.py cannot read the bound {bound!r}")
        order = compare(version, match[2])
        holds = {">=": order >= 0, "<=": order <= 0, "==": order == 0, "!=": order != 0, ">": order > 0, "<": order < 0}
        if not holds[match[1]]:
            return False
    return True


def lacking(requirement: str) -> str | None:
    """What is wrong with this requirement here, or None if it is met."""
    match = REQUIREMENT.match(requirement)
    if match is None:
        raise SystemExit(f"{PYPROJECT}: scripts/requirements.py cannot read the requirement {requirement!r}")
    name, bounds = match.groups()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    if not satisfies(version, bounds):
        return f"{requirement} is needed, {version} is installed"
    if find_spec(IMPORT_NAMES.get(name, name.replace("-", "_"))) is None:
        return f"{requirement} is listed as installed, but cannot be imported"
    return None


def requirements(extras: list[str]) -> list[str]:
    """The core dependencies and those of the extras, as pyproject.toml writes them."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def main(extras: list[str]) -> int:
    problems = [problem for requirement in requirements(extras) if (problem := lacking(requirement))]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
