"""Tracing of rollouts: nothing is sent anywhere, as in verl without a backend; samples/ of a run has every response."""

from __future__ import annotations

from typing import Any, TypeVar

from verl._missing import not_given

__getattr__ = not_given(__name__)
Function = TypeVar("Function")


def rollout_trace_op(function: Function) -> Function:
    """The function itself."""
    return function


def rollout_trace_attr(**attributes: Any) -> Any:
    """A context without effect."""
    from contextlib import nullcontext

    return nullcontext()
