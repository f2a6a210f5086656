"""The package `posttrain-verl` from its folder; what a test registers is forgotten again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPAT = str(Path(__file__).resolve().parents[2] / "compat")
if COMPAT not in sys.path:
    sys.path.append(COMPAT)


@pytest.fixture(autouse=True)
def separate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes find the package too, and the registries are as they were after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([COMPAT, os.environ.get("PYTHONPATH", "")]))
    from posttrain.algorithms import registry
    from verl._algorithms import registries

    tables = [registry.ADV_ESTIMATORS, registry.POLICY_LOSSES]
    tables += [registries.ADV_ESTIMATOR_REGISTRY, registries.POLICY_LOSS_REGISTRY]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
