"""The package `posttrain-verl` from its folder; what a test registers is forgotten again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

COMPAT = str(Path(__file__).resolve().parents[2] / "compat")
if COMPAT not in sys.path:
    sys.path.append(COMPAT)


@pytest.fixture(autouse=True)
def separate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the package too, and the registries are as they were after the test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([COMPAT, os.environ.get("PYTHONPATH", "")]))
    from posttrain.algorithms import registry
    from verl._algorithms import registries

    for module, names in ((registry, ("ADV_ESTIMATORS", "POLICY_LOSSES")), (registries, ("ADV_ESTIMATOR_REGISTRY",))):
        for name in names:
            for key in (kept := dict(getattr(module, name))):
                monkeypatch.setitem(getattr(module, name), key, kept[key])
