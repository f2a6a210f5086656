"""Sandboxes with small limits, for tests."""

from __future__ import annotations

import pytest

from posttrain.config.sandbox import SandboxConfig
from posttrain.sandbox import Sandbox, SandboxError

SMALL = {"memory_mb": 96, "processes": 8, "disk_mb": 8, "output_kb": 64}


def opened(**settings):
    sandbox = Sandbox(SandboxConfig(**settings))
    try:
        sandbox.start()
    except SandboxError as error:
        pytest.skip(f"no namespaces here: {error}")
    return sandbox
