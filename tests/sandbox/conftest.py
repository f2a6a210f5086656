"""Sandboxes for tests: warm, shared by all tests of the folder, skipped where the kernel allows none."""

from __future__ import annotations

import pytest
from sandbox_tools import SMALL, opened


@pytest.fixture(scope="session")
def box():
    """Small limits, and time enough."""
    with opened(timeout_s=10.0, **SMALL) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def roomy():
    """Limits as they are by default: numpy, pytest and threads need some."""
    with opened(timeout_s=60.0) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def hasty():
    """Small limits and a short deadline, for programs that would never end."""
    with opened(timeout_s=0.5, **SMALL) as sandbox:
        yield sandbox
