"""Small helpers with dicts, time limits and the environment."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from posttrain.batch.fields import same


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """The first with the second's entries; those of both must be equal."""
    for key, value in dict2.items():
        assert key not in dict1 or same(dict1[key], value), f"{key} differs: {dict1[key]!r} and {value!r}"
        dict1[key] = value
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every name with the prefix, which is not added twice."""
    return {_prefixed(key, prefix): value for key, value in data.items()}


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Appends each value to the list of its name; a list's values one by one."""
    from verl.utils.metric import Metric

    for key, value in new_data.items():
        name = _prefixed(key, prefix)
        if name not in data:
            data[name] = value.init_list() if isinstance(value, Metric) else []
        if isinstance(value, list):
            data[name].extend(value)
        else:
            data[name].append(value)


def _prefixed(key: str, prefix: str) -> str:
    return key if key.startswith(prefix) else f"{prefix}{key}"


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns; the first row names them."""
    columns: dict[str, list[Any]] = {key: [] for key in (list_of_dict[0] if list_of_dict else ())}
    for row in list_of_dict:
        for key, value in row.items():
            assert key in columns, f"Key '{key}' is not in the first of the dicts, which has {list(columns)}"
            columns[key].append(value)
    return columns


def convert_to_regular_types(obj: Any) -> Any:
    """Hydra's containers as dicts and lists."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(obj, dict | DictConfig):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | ListConfig):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def convert_nested_value_to_list_recursive(data_item: Any) -> Any:
    """Arrays inside dicts and lists as lists."""
    if isinstance(data_item, dict):
        return {key: convert_nested_value_to_list_recursive(value) for key, value in data_item.items()}
    if isinstance(data_item, np.ndarray):
        data_item = data_item.tolist()
    if isinstance(data_item, list):
        return [convert_nested_value_to_list_recursive(value) for value in data_item]
    return data_item


class NestedNamespace(SimpleNamespace):
    """A dict whose entries, and those of the dicts in it, are attributes."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        entries = {k: NestedNamespace(v) if isinstance(v, dict) else v for k, v in dictionary.items()}
        super().__init__(**{**kwargs, **entries})


@contextlib.contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """An environment variable for the time of a `with`."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        os.environ.pop(key, None)
        if before is not None:
            os.environ[key] = before


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: TimeoutError after so many seconds. The function runs in a process of its own, which is then ended;
    with `use_signals` in this one (main thread only)."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        limited = _limited_by_signal if use_signals else _limited_by_process
        return functools.wraps(function)(functools.partial(limited, function, seconds))

    return decorate


def _limited_by_signal(function: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
    def ring(*_: Any) -> None:
        raise _out_of_time(function, seconds)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _limited_by_process(function: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
    context = multiprocessing.get_context("fork")
    answers = context.Queue(maxsize=1)
    process = context.Process(target=_answer, args=(answers, function, args, kwargs))
    process.start()
    try:
        worked, value = answers.get(timeout=seconds)
    except queue.Empty:
        raise _out_of_time(function, seconds) from None
    finally:
        process.terminate()
        process.join()
    if not worked:
        raise value
    return value


def _answer(answers: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        answers.put((True, function(*args, **kwargs)))
    except Exception as error:
        answers.put((False, error))


def _out_of_time(function: Callable[..., Any], seconds: float) -> TimeoutError:
    return TimeoutError(f"Function {getattr(function, '__name__', function)} timed out after {seconds} seconds!")


class DynamicEnumMeta(type):
    """Makes a class behave like an enumeration of what stands in its `_registry`."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        yield from cls._registry.values()

    def __contains__(cls, item: Any) -> bool:
        return any(item in (name, member) for name, member in cls._registry.items())

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def names(cls) -> list[str]:
        return [*cls._registry]

    def values(cls) -> list[Any]:
        return [*cls]


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration whose members are added while a program runs; a subclass has a `_registry` of its own."""

    _registry: dict[str, Any] = {}  # noqa: RUF012
    _next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> Any:
        return getattr, (type(self), self.name)  # there is one object per member, in every process

    @classmethod
    def register(cls, name: str) -> Any:
        """Adds a member, whose name is written in capitals."""
        name = name.upper()
        if name in cls._registry:
            raise ValueError(f"{cls.__name__} has a member {name} already")
        cls._registry[name] = member = cls(name, cls._next_value)
        cls._next_value += 1
        setattr(cls, name, member)
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        member = cls._registry.pop(name.upper())
        delattr(cls, member.name)
        return member

    @classmethod
    def from_name(cls, name: str) -> Any:
        """The member, or None."""
        return cls._registry.get(name.upper())
