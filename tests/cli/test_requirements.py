"""scripts/requirements.py: version bounds without any package to compare them with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "requirements.py"
_spec = importlib.util.spec_from_file_location("requirements_check", FILE)
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)


@pytest.mark.parametrize(
    ("version", "bounds", "met"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),  # by number, not by letter
        ("2.13", "==2.13.0", True),
        ("5.17.0rc1", ">=5.17,<6", True),
        ("3.1.6", "", True),
        ("1.0", ">1.0", False),
        ("1.1", "!=1.1", False),
    ],
)
def test_bounds(version: str, bounds: str, met: bool):
    assert check.satisfies(version, bounds) is met


def test_a_missing_and_an_old_package_are_told_apart():
    assert check.lacking("surely-not-installed>=1") == "surely-not-installed>=1 is not installed"
    assert "is needed" in check.lacking("pytest>=999")
    assert check.lacking("hydra-core>=1.3") is None


def test_every_requirement_of_the_project_can_be_read():
    lines = check.requirements(["dev"])
    assert any(line.startswith("torch") for line in lines) and any(line.startswith("pytest") for line in lines)
    for line in lines:
        check.lacking(line)
