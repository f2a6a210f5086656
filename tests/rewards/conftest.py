"""Shared by the tests of rewards."""

from __future__ import annotations

import pytest

from posttrain.rewards.scorers import code
from posttrain.sandbox import Sandbox, SandboxError


@pytest.fixture(scope="session")
def sandboxed():
    """Skips where the kernel lets no program be isolated."""
    try:
        with Sandbox() as sandbox:
            sandbox.start()
    except SandboxError as error:
        pytest.skip(f"no namespaces here: {error}")
    yield
    code.close()
