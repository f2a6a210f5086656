"""Helpers around Ray and asyncio."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
    "ONEAPI_DEVICE_SELECTOR",
)


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks Ray to leave the list of visible devices alone."""
    return any(env_vars.get(f"RAY_EXPERIMENTAL_NOSET_{name}") for name in _DEVICES)


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[Any]:
    """References to the objects in Ray's store, in their order."""
    import ray

    assert len(data_list) > 0, "data_list must not be empty"
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as pool:
        return list(pool.map(ray.put, data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """This thread's event loop, which is made where there is none."""
    try:
        return asyncio.get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def run_coroutine_sync(coro: Any) -> Any:
    """The result of an awaitable, waited for here; anything else is returned as it is."""
    if not inspect.isawaitable(coro):
        return coro

    async def awaited() -> Any:
        return await coro

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    # A loop cannot wait for itself, so that another thread has one of its own.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, awaited()).result()


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: a coroutine function that plain code calls too; a coroutine that calls it awaits what it gets."""

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        is_awaited = caller is not None and caller.f_code.co_flags & inspect.CO_COROUTINE
        if not inspect.iscoroutine(made) or (is_awaited and _loop_runs()):
            return made
        return run_coroutine_sync(made)

    return called


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
