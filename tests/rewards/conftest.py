"""Shared by the tests of rewards."""

from __future__ import annotations

import pytest

from posttrain.rewards.scorers import code
from posttrain.sandbox import Sandbox
from tests.machine import warm


@pytest.fixture(scope="session")
def sandboxed():
    """Skips where the kernel lets no program be isolated."""
    with warm(Sandbox()):
        pass
    yield
    code.close()
