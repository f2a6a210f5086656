"""The Dockerfile copies files that exist, and everything that an installation needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def copied() -> list[str]:
    return [name for line in re.findall(r"^COPY (.+)$", TEXT, re.M) for name in line.split()[:-1]]


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert copied() and all((ROOT / name).exists() and name not in ignored for name in copied())


def test_all_that_the_package_is_built_from_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "posttrain", project["readme"], *project["license-files"]} <= set(copied())


def test_the_torch_of_the_image_is_the_one_that_the_package_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.search(r'^ARG TORCH="(.+)"$', TEXT, re.M)[1] in project["dependencies"]
