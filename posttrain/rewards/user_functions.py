"""In a worker: the reward of the user, a function of a file, behind a dotted path, or behind a URL.

Of a file with several functions one is chosen. To a URL rows go as JSON in one POST per group, scores come back:

out:  {"rows": [{"data_source": ..., "solution_str": ..., "ground_truth": ..., "extra_info": ...}, ...]}
back: {"scores": [0.5, {"score": 1.0, "acc": 1}, ...]}, or the list alone

Temporary failures are retried (posting.py); rows that still fail get an error. All attempts together end before the
score's deadline.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import types
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.posting import Patience, Refused, post_json
from posttrain.rewards.signatures import FORMS, explain_import_failure, form_of, read_results
from posttrain.rewards.types import Fields, Outcome, RewardError, RewardSpec, failure
from posttrain.texts import mask_urls


def import_file(path: Path) -> types.ModuleType:
    """Import the user's file as a module."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RewardError(
            f"reward file {path} does not exist{hint}",
            todo="give the path of a Python file, relative to the working folder",
        )
    # The file can import its neighbours, as when it is run as a script.
    sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    loader = module_spec.loader if module_spec is not None else None
    if module_spec is None or loader is None:
        raise RewardError(f"reward file {path} is no Python file", todo="give a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    _run_import(lambda: loader.exec_module(module), str(path))
    return module


def find_dotted(spec: RewardSpec) -> Callable[..., Any]:
    """Find the function of a dotted path, which ends at a function or at a module."""
    sys.path.insert(0, spec.folder)
    parts = spec.path.split(".")
    _prefer_folder(Path(spec.folder), parts)
    for length in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:length]), parts[length:]
        module = _run_import(lambda name=name: importlib.import_module(name), spec.path, absent_ok=name)
        if module is None:
            continue
        if not rest:
            return choose_function(module, spec.name, module_name=parts[-1])
        if spec.name and spec.name != rest[-1]:
            raise RewardError(
                f"custom_reward_function.path={spec.path} names {rest[-1]}, but .name is {spec.name}",
                todo="leave one of them out",
            )
        target: Any = module
        for attribute in rest:
            target = getattr(target, attribute, None)
        if callable(target):
            return instantiate(target)
        raise _no_such_function(module, rest[-1])
    hint = "; names under `verl.` need the package posttrain-verl" if parts[0] == "verl" else ""
    raise RewardError(
        f"no module {parts[0]!r} for the reward {spec.path} in {spec.folder} or among the installed packages{hint}",
        todo="give module.function as seen from the working folder, or the path of a Python file",
    )


def _prefer_folder(folder: Path, parts: list[str]) -> None:
    # A folder without __init__.py that holds the module takes precedence over an installed package of the same name.
    first = folder / parts[0]
    if not first.is_dir() or (first / "__init__.py").exists() or parts[0] in sys.modules:
        return
    if any(folder.joinpath(*parts[:n]).with_suffix(".py").is_file() for n in range(2, len(parts) + 1)):
        package = types.ModuleType(parts[0])
        package.__path__ = [str(first)]
        sys.modules[parts[0]] = package


def _run_import(action: Callable[[], Any], what: str, absent_ok: str | None = None) -> Any:
    try:
        return action()
    except ModuleNotFoundError as error:
        # `a.b.c` may be a function: then the module a.b.c (or, one level up, the "package" a.b) is what was not found.
        if absent_ok is not None and error.name and (absent_ok + ".").startswith(error.name + "."):
            return None
        raise explain_import_failure(error, what) from error
    except BaseException as error:
        raise explain_import_failure(error, what) from error


def choose_function(module: types.ModuleType, name: str | None, module_name: str | None = None) -> Callable[..., Any]:
    """Return the named function, the one named like the module (dotted paths), `compute_score`, or the only one."""
    if name is not None:
        if callable(getattr(module, name, None)):
            return instantiate(getattr(module, name))
        raise _no_such_function(module, name)
    for usual in (module_name, "compute_score"):
        if usual and callable(getattr(module, usual, None)):
            return instantiate(getattr(module, usual))
    public = _public_functions(module)
    fitting = [function for function in public.values() if form_of(function)]
    if len(fitting) == 1:
        return fitting[0]
    if len(public) == 1:
        return next(iter(public.values()))  # its signature is rejected with its own message
    if not public:
        raise RewardError(
            f"{module.__file__} defines no public function",
            todo="define compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        )
    candidates = ", ".join(f"{name}{_signature(function)}" for name, function in public.items())
    raise RewardError(
        f"{module.__file__} has no compute_score, and {len(fitting) or 'none'} of its functions could be the reward: "
        + candidates,
        todo="set custom_reward_function.name to the one to use, or sum several by reward.functions"
        if fitting
        else f"name its parameters {FORMS}",
    )


def _public_functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_own_function(value, module)
    }


def _is_own_function(value: Any, module: types.ModuleType) -> bool:
    # A function of this file, a partial one, or a callable object of a class of this file.
    if inspect.isclass(value) or not callable(value):
        return False
    return isinstance(value, partial) or getattr(value, "__module__", None) == module.__name__


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(unknown)"


def instantiate(function: Any) -> Any:
    """Return the reward itself; for a class with callable objects, one object."""
    if not inspect.isclass(function) or "__call__" not in dir(function):
        return function
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise RewardError(
            f"the reward {function.__name__} is a class that is made with arguments: {_signature(function)}",
            todo=f"name an object of it, such as my_reward = {function.__name__}(...), or give defaults",
        ) from None
    return function()


def _no_such_function(module: types.ModuleType, name: str) -> RewardError:
    public = list(_public_functions(module))
    near = difflib.get_close_matches(name, public, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RewardError(
        f"{module.__file__} has no function {name!r}{hint}",
        todo=f"use one of: {', '.join(public) or '(it defines none)'}",
    )


NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
# The share of a score's time for all attempts; the rest is for writing and reading.
_SHARE = 0.9


@dataclass
class Remote:
    """Scores items on a server; `total_s` limits all attempts together."""

    url: str
    # How often a request is tried.
    attempts: int = 4
    # Seconds for one attempt; None gives each attempt the time that is left.
    attempt_s: float | None = None
    # Pause before the second attempt; it doubles each time.
    pause_s: float = 0.1
    # Environment variable whose value is sent as the bearer token.
    token_env: str | None = None
    total_s: float = 10.0

    @property
    def shown(self) -> str:
        return mask_urls(self.url)

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        try:
            body = json.dumps({"rows": [dict(zip(NAMES, item[:4], strict=True)) for item in items]}, default=_plain)
            answer = self._post(body.encode())
        except (Refused, TypeError, ValueError) as error:
            return [failure(f"{self.shown}: {error}")] * len(items)
        scores = answer.get("scores", answer) if isinstance(answer, dict) else answer
        return [
            (score, parts, f"{self.shown} {error}" if error else None)
            for score, parts, error in read_results(scores, len(items))
        ]

    def check(self) -> None:
        """Raise RewardError if the server does not answer; its response to an empty batch does not matter."""
        try:
            self._post(b'{"rows": []}')
        except Refused as error:
            if error.status not in (None, 404):
                return
            raise RewardError(
                f"the reward server {self.shown} does not answer: {error}",
                todo="start it, or correct the URL; it takes POST requests",
            ) from None
        except ValueError:
            return

    def _post(self, body: bytes) -> Any:
        address, user = _without_user(self.url)
        headers = {}
        if self.token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.token_env, '')}"
        elif user:
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        patience = Patience(self.attempts, self.pause_s, _SHARE * self.total_s, self.attempt_s)
        return post_json(address, body, headers, patience)


def _without_user(url: str) -> tuple[str, str]:
    # urllib takes `user:password@` for a part of the host name.
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), urllib.parse.unquote(user)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy values, from parquet columns
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value)
