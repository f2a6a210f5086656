"""Runs untrusted code under kernel limits: `with Sandbox() as box: box.run("print(1 + 1)").stdout == "2\\n"`.

Namespaces, a system call filter and resource limits confine a program; docs/sandbox.md says what that covers. Jobs are
forked from a warm Python, one at a time and each into fresh namespaces. A job leaves nothing for the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.lazy import lazy_names

if TYPE_CHECKING:
    from posttrain.sandbox.sandbox import Result, Sandbox, SandboxError, TestReport

__all__ = ["Result", "Sandbox", "SandboxError", "TestReport"]
# The processes inside the sandbox import this package too, and need none of these classes.
__getattr__ = lazy_names(__name__, sandbox="Result Sandbox SandboxError TestReport")
