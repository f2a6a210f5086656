"""What this machine offers, found out without the code under test: a test is skipped for want of a compiler, of kernel
namespaces or of instructions, never because our own use of them is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from posttrain.sandbox import Sandbox, SandboxError

INSTRUCTIONS = {"float32": {"avx512f", "asimd"}, "bfloat16": {"amx_bf16"}}  # asimd: of 64-bit ARM


@cache
def kernel_isolates() -> bool:
    """Whether the kernel grants all the namespaces that the sandbox asks for."""
    if not (sys.platform.startswith("linux") and shutil.which("unshare")):
        return False
    return subprocess.run(["unshare", "-Urmpniu", "--fork", "true"], capture_output=True).returncode == 0


def warm(sandbox: Sandbox) -> Sandbox:
    """The sandbox, warm; skips the test where the kernel refuses namespaces to anybody."""
    try:
        sandbox.start()
    except SandboxError as error:
        if kernel_isolates():
            raise
        pytest.skip(f"no namespaces here: {error}")
    return sandbox


def has_compiler() -> bool:
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    asked = os.environ.get("POSTTRAIN_COMPILE") != "0" and sys.platform.startswith("linux")
    return asked and any(name and shutil.which(name) for name in names)


def multiplies(dtype: str) -> bool:
    """Whether the processor has the instructions that whole steps of this type are written for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if has_compiler() else []
    known = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return not INSTRUCTIONS[dtype].isdisjoint(known)
