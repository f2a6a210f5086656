"""Sandboxes with small limits, for tests."""

from __future__ import annotations

from posttrain.config.rollout import SandboxConfig
from posttrain.sandbox import Sandbox
from tests.machine import warm

SMALL = {"memory_mb": 96, "processes": 8, "disk_mb": 8, "output_kb": 64}


def opened(**settings):
    return warm(Sandbox(SandboxConfig(**settings)))
