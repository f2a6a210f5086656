"""Bounds chat templates: `bound_templates(tokenizer, folder)` limits time and memory of every rendering.

A chat template is a program from a model's folder. An endless loop in it would hang whatever loads data, and one that
builds gigabytes would exhaust the machine's memory. Two limits apply, neither of which measurably slows an ordinary
prompt:

- The first rendering of a template runs in its own process, with limits of the kernel (template_trial.py). This stops
  what Python cannot interrupt.
- A thread checks every running rendering each `_TICK_S` seconds. It raises an exception in the rendering thread, at its
  next Python instruction, once that has used `RENDER_S` seconds of CPU time or the process has grown by `RENDER_BYTES`.
  So a template that loops only on some conversations is stopped too.

CPU time is used because a busy machine must not turn a good template into a bad one.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.models import template_trial
from posttrain.models.model_files import ModelError

# Seconds of CPU time for one rendering; ordinary ones take less than a thousandth of one.
RENDER_S = 5
# Memory that one rendering may take.
RENDER_BYTES = 1 << 30
# Characters of a rendered text, besides those of the conversation itself.
LONGEST = 1 << 26
_TICK_S = 0.25
# The watching thread ends after this many ticks without a rendering.
_IDLE_TICKS = 8
# A trial that gets no processor time by then is abandoned: it has shown nothing.
_TRIAL_WALL_S = 60.0


class EndlessTemplate(ModelError):
    """A chat template that did not end, or took too much memory."""


def bound_templates(tokenizer: Any, folder: str) -> Any:
    """Make the tokenizer's `apply_chat_template` raise `EndlessTemplate` instead of hanging."""
    tokenizer.apply_chat_template = _Bounded(tokenizer, folder)
    return tokenizer


class _Bounded:
    """`tokenizer.apply_chat_template` with limits. A class, so that tokenizers can still be copied and pickled."""

    def __init__(self, tokenizer: Any, folder: str) -> None:
        self._tokenizer, self._folder = tokenizer, folder

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return functools.partial(type(self._tokenizer).apply_chat_template, self._tokenizer)

    def __call__(self, conversation: Any, *args: Any, **options: Any) -> Any:
        if (problem := self._trial(conversation, options)) is not None:
            raise self._error(problem)
        try:
            text = _render_watched(lambda: self.__wrapped__(conversation, *args, **options))
        except _Stopped as stopped:
            raise self._error(stopped.why) from None
        if isinstance(text, str) and len(text) > LONGEST and len(text) > LONGEST + len(str(conversation)):
            raise self._error(f"made a text of {len(text):,} characters")
        return text

    def _trial(self, conversation: Any, options: dict[str, Any]) -> str | None:
        # What is wrong with the template, found when this process first tried it; None if nothing is.
        try:
            template = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        except Exception:  # there is none, which the method itself reports
            return None
        if template not in _tried:
            messages = conversation[0] if conversation and isinstance(conversation[0], list) else conversation
            unset = {"tools": None, "documents": None, "add_generation_prompt": False}
            variables = {"messages": messages, **unset, **self._tokenizer.special_tokens_map, **options}
            _tried[template] = _outcome(template, variables)
        return _tried[template]

    def _error(self, why: str) -> EndlessTemplate:
        return EndlessTemplate(
            f"The chat template of {self._folder} {why} for one prompt. Look for loops without end in its "
            "chat_template.jinja (or `chat_template` in tokenizer_config.json), fetch the model again, or take another "
            "tokenizer by model.tokenizer_path."
        )


# -- the first rendering, in a process of its own ----------------------------------------------------------------------

# Templates that this process has tried -> what is wrong with them.
_tried: dict[str, str | None] = {}


def _outcome(template: str, variables: dict[str, Any]) -> str | None:
    limits = {"seconds": RENDER_S, "bytes": RENDER_BYTES}
    program = [sys.executable, "-S", "-E", str(Path(template_trial.__file__))]
    try:
        job = json.dumps({"path": sys.path, "template": template, "variables": variables, **limits}, default=str)
        done = subprocess.run(program, input=job.encode(), capture_output=True, timeout=_TRIAL_WALL_S, check=False)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return None  # the trial showed nothing; the watching thread still applies
    if done.returncode == -getattr(signal, "SIGXCPU", 0) != 0:
        return _Stopped.why
    return _StoppedForMemory.why if done.returncode == template_trial.TOO_BIG else None


# -- every rendering, watched ------------------------------------------------------------------------------------------


class _Stopped(BaseException):
    """Raised in a rendering thread. Not an `Exception`, because jinja would treat that as the template's own."""

    why = f"did not end within {RENDER_S} seconds"


class _StoppedForMemory(_Stopped):
    why = f"took more than {RENDER_BYTES >> 20} MiB of memory"


class _Rendering:
    """One rendering of a thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.cpu_s = _cpu_s(self.thread)
        # Memory of the process when the rendering was first seen.
        self.bytes: int | None = None
        self.stopped: type[_Stopped] | None = None


_renderings: dict[int, _Rendering] = {}
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def _render_watched(render: Callable[[], Any]) -> Any:
    mine = _Rendering()
    _begin(mine)
    try:
        try:
            return render()
        finally:
            with _lock:  # from here on it can no longer be stopped
                _renderings.pop(mine.thread, None)
            _raise_if_stopped(mine)
    except _Stopped:
        # The exception may arrive within the lines above: remove the rendering, and cancel an exception still pending.
        with _lock:
            _renderings.pop(mine.thread, None)
        _cancel(mine.thread)
        raise


def _raise_if_stopped(mine: _Rendering) -> None:
    if mine.stopped is not None:
        _cancel(mine.thread)
        raise mine.stopped


def _begin(mine: _Rendering) -> None:
    global _watcher
    with _lock:
        _renderings[mine.thread] = mine
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="chat templates", daemon=True)
            _watcher.start()


def _watch() -> None:
    global _watcher
    idle = 0
    while idle < _IDLE_TICKS:
        time.sleep(_TICK_S)
        with _lock:
            idle = 0 if _renderings else idle + 1
            for rendering in list(_renderings.values()):
                _check_rendering(rendering)
            if idle == _IDLE_TICKS:
                _watcher = None  # under the lock, so that a rendering that begins now starts another


def _check_rendering(rendering: _Rendering) -> None:
    used = _memory()
    if rendering.bytes is None:
        rendering.bytes = used
    if rendering.stopped is not None:
        return
    if _cpu_s(rendering.thread) - rendering.cpu_s > RENDER_S:
        rendering.stopped = _Stopped
    elif used - rendering.bytes > RENDER_BYTES:
        rendering.stopped = _StoppedForMemory
    if rendering.stopped is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(rendering.thread), ctypes.py_object(rendering.stopped)
        )


def _cancel(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def _cpu_s(thread: int) -> float:
    # Wall time where the system does not report CPU time.
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _memory() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _forget_after_fork() -> None:
    # A forked process has none of the threads.
    global _watcher, _lock
    _watcher, _lock = None, threading.Lock()
    _renderings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
