"""Loads the user's reward function: `resolve_reward` checks it before a run, `load_function` loads it in workers.

The training process never imports the user's file: `resolve_reward` starts one worker, which imports the file and
checks signatures. It then ends, or becomes the first of the run's workers. So the check sees what the workers will see,
and a file that exits, hangs or prints cannot harm the run.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.rewards.signatures import BatchCall, call_and_read, check_call, columns_needed, make_caller, name_of
from posttrain.rewards.types import (
    NONE_APPLIES,
    Fields,
    Outcome,
    RewardError,
    RewardList,
    RewardPart,
    RewardSpec,
    ScoreItems,
)
from posttrain.rewards.user_functions import choose_function, find_dotted, import_file, instantiate
from posttrain.texts import mask_urls

if TYPE_CHECKING:
    from posttrain.config.rollout import CustomRewardConfig
    from posttrain.rewards.crew import WorkerProcess


def resolve_reward(
    config: CustomRewardConfig,
    *,
    functions: Mapping[str, Any] | None = None,
    function: Callable[..., Any] | RewardList | None = None,
    where: str = "custom_reward_function",
    spec_fields: Mapping[str, Any] | None = None,
    kept: list[WorkerProcess] | None = None,
) -> RewardSpec:
    """Describe the reward that the settings (or function objects) name, checked without calling it.

    With `functions`, those of the setting `reward.functions`, the reward is their weighted sum. `spec_fields` are set
    on the spec, so that the worker which checks the reward could also score. That worker is appended to `kept`, to
    become the first of a RewardPool; without such a list it is ended.
    """
    try:
        if functions:
            spec = _combine(config, function, functions)
        elif isinstance(function, RewardList):
            spec = _combine_objects(config, function)
        else:
            if function is not None:
                _check_is_function(function)
            spec = _describe(config, function)
        spec = replace(spec, **(spec_fields or {}))
        return spec if spec.kind == "builtin" else _checked(spec, kept)
    except RewardError as error:
        error.where = error.where or (where if function is None else "the `reward` argument")
        raise


def load_scores(spec: RewardSpec) -> tuple[ScoreItems, RewardSpec]:
    """In a worker: return what scores a response or a group, and the spec completed by what was found."""
    score, found = _load_scores(spec)
    return (_fail_if_none_applies(score) if found.form == "batch" else score), found


def _fail_if_none_applies(score: ScoreItems) -> ScoreItems:
    # A response that no function applies to has no score.
    def scores(items: Sequence[Fields]) -> list[Outcome]:
        return [
            (0.0, parts, NONE_APPLIES) if math.isnan(found) else (found, parts, error)
            for found, parts, error in score(items)
        ]

    return scores


def _load_scores(spec: RewardSpec) -> tuple[ScoreItems, RewardSpec]:
    if spec.kind == "combined":
        return _load_combined(spec)
    if spec.kind == "shape":
        from posttrain.rewards.combined import shaping

        return _on_model_text(shaping(spec.kwargs)), spec
    if spec.kind == "url":
        return _load_remote(spec)
    function, spec = load_function(spec)
    if spec.form == "batch":
        return BatchCall(function, spec.kwargs), spec
    call = make_caller(function, spec.form, spec.kwargs)
    scores: ScoreItems = lambda items: call_and_read(call, items, spec.form)  # noqa: E731
    return (_on_model_text(scores) if spec.kind == "builtin" else scores), spec


def _on_model_text(score: ScoreItems) -> ScoreItems:
    # Built-in rewards read only what the model wrote: a tool's output must not count as its answer or its format.
    # Users' functions get the whole response, as in other systems, and what the model wrote in `extra_info`.
    def scores(items: Sequence[Fields]) -> list[Outcome]:
        return score([item if item[5] is None else (item[0], item[5], *item[2:]) for item in items])

    return scores


def _load_combined(spec: RewardSpec) -> tuple[ScoreItems, RewardSpec]:
    from posttrain.rewards.combined import Combined

    loaded: list[tuple[RewardPart, ScoreItems]] = []
    for part in spec.parts:
        try:
            score, found = _load_scores(replace(part.spec, timeout_s=spec.timeout_s))
        except RewardError as error:
            named = part.name if part.spec.kind == "pickled" else f"reward.functions.{part.name}"
            raise RewardError(f"{named}: {error.what}", error.where, error.todo) from error
        loaded.append((replace(part, spec=found), score))
    forms = {part.spec.form for part, _ in loaded}
    parts = [part for part, _ in loaded]
    label = " + ".join(f"{part.weight:g} x {part.name} ({part.spec.label})" for part in parts)
    form = next((one for one in ("batch", "list") if one in forms), "source")
    columns = sorted({name for part in parts for name in part.spec.columns})
    return Combined(loaded), replace(spec, parts=parts, form=form, columns=columns, label=label)


def _load_remote(spec: RewardSpec) -> tuple[ScoreItems, RewardSpec]:
    from posttrain.rewards.remote import Remote

    try:
        remote = Remote(spec.path, total_s=spec.timeout_s, **spec.kwargs)
    except TypeError:
        raise RewardError(
            f"custom_reward_function.reward_kwargs of a URL are attempts, attempt_s, pause_s and token_env, not "
            f"{', '.join(spec.kwargs)}",
            todo="remove the others",
        ) from None
    if spec.name is None:  # only before the run: workers that start later notice when they score
        remote.check()
    return remote, replace(spec, name="url", form="list", label=mask_urls(spec.path))


def check_columns(spec: RewardSpec, known: Collection[str]) -> None:
    """Raise RewardError if the reward takes a column by name that no row has."""
    missing = [name for name in spec.columns if name not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RewardError(
            f"the reward ({spec.label}) takes {', '.join(missing)}, and the rows have no such column{hint}",
            "the parameters of the function, which are columns of the data besides "
            "prompts, completions, completion_ids, trainer_state, log_extra and log_metric",
            f"use one of: {', '.join(sorted(known))}; or give it a default, or a value in reward_kwargs",
        )


def load_function(spec: RewardSpec) -> tuple[Callable[..., Any], RewardSpec]:
    """In a worker: return the function of a spec, and the spec with its name, form and label filled in."""
    if spec.kind == "builtin":
        from posttrain.rewards.scorers import find_scorer, score_by_source

        if not spec.path:
            return score_by_source, spec
        scorer = find_scorer(spec.path)
        return lambda solution_str, ground_truth, extra_info: scorer(solution_str, ground_truth, extra_info), spec
    if spec.kind == "pickled":
        sys.path[:] = [*spec.sys_path, *(p for p in sys.path if p not in spec.sys_path)]
        function, place = pickle.loads(spec.pickled), "passed from Python"
    elif spec.kind == "file":
        function = choose_function(import_file(Path(spec.path)), spec.name)
        place = f"in {spec.path}"
    else:
        function = find_dotted(spec)
        place = f"in {inspect.getsourcefile(inspect.unwrap(function)) or spec.path}"
    function = instantiate(function)
    form, name = check_call(function, spec.kwargs), name_of(function)
    columns = columns_needed(function, form, spec.kwargs)
    found = RewardSpec(**{**vars(spec), "name": name, "form": form, "columns": columns, "label": f"{name} {place}"})
    return function, found


def _combine(
    config: CustomRewardConfig, function: Callable[..., Any] | RewardList | None, functions: Mapping[str, Any]
) -> RewardSpec:
    from posttrain.rewards.combined import read_parts

    if config.path or function is not None:
        named = f"custom_reward_function.path={config.path}" if config.path else "a function object"
        raise RewardError(
            f"two rewards are named: {named} and reward.functions ({', '.join(functions)})",
            "reward.functions",
            "give your function a name in reward.functions and a path there, or leave reward.functions out",
        )
    parts = []
    for part, own in read_parts(dict(functions)):
        parts.append(replace(part, spec=_describe(own, None)) if own is not None else part)
    return RewardSpec(kind="combined", parts=parts)


def _check_is_function(given: Any) -> None:
    if not callable(given):
        raise RewardError(
            f"{given!r} is no function",
            todo="give a function; a file is named by the setting custom_reward_function.path (several by "
            "reward.functions), and a reward model by reward_model.enable",
        )


def _combine_objects(config: CustomRewardConfig, given: RewardList) -> RewardSpec:
    from posttrain.rewards.combined import part_name

    if config.path:
        raise RewardError(
            f"two rewards are named: function objects and custom_reward_function.path={config.path}",
            todo="keep one of them",
        )
    if not given.functions:
        raise RewardError("the list of reward functions is empty", todo="give one function or several")
    weights = [1.0] * len(given.functions) if given.weights is None else list(given.weights)
    if len(weights) != len(given.functions):
        raise RewardError(
            f"{len(weights)} weights are given for {len(given.functions)} reward functions",
            "the `reward_weights` argument",
            "give one weight for each function",
        )
    parts: list[RewardPart] = []
    for function, weight in zip(given.functions, weights, strict=True):
        _check_is_function(function)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise RewardError(
                f"the weight {weight!r} of {name_of(function)} is not a finite number",
                "the `reward_weights` argument",
                "give a number; below 0 is a penalty",
            )
        from_list = _describe(replace(config, path=None), function)
        parts.append(
            RewardPart(part_name(name_of(function), [part.name for part in parts]), float(weight), None, from_list)
        )
    return RewardSpec(kind="combined", parts=parts)


def _describe(config: CustomRewardConfig, function: Callable[..., Any] | None) -> RewardSpec:
    kwargs = dict(config.reward_kwargs or {})
    if function is not None:
        if config.path:
            raise RewardError(
                f"two rewards are named: a function object and custom_reward_function.path={config.path}",
                todo="keep one of them",
            )
        reward: Callable[..., Any] = instantiate(function)
        check_call(reward, kwargs)
        return RewardSpec(kind="pickled", kwargs=kwargs, sys_path=list(sys.path), pickled=_pickle(reward))
    if not config.path:
        for key in ("name", "reward_kwargs"):
            if config[key]:
                raise RewardError(
                    f"custom_reward_function.{key} is set, but no function is named",
                    todo="set custom_reward_function.path to the file that holds it",
                )
        return RewardSpec()
    if config.path.startswith(("http://", "https://")):
        if config.name:
            raise RewardError("custom_reward_function.name is set, but a URL has no functions", todo="leave it out")
        return RewardSpec(kind="url", path=config.path, kwargs=kwargs)
    path = os.path.expanduser(config.path)
    if path.endswith(".py") or os.sep in path or os.path.isfile(path):
        return RewardSpec(kind="file", path=os.path.abspath(path), name=config.name, kwargs=kwargs)
    return RewardSpec(kind="dotted", path=path, name=config.name, kwargs=kwargs)


def _pickle(function: Callable[..., Any]) -> bytes:
    # Pickled with the globals it uses, unless it is from an installed package, which workers can import. Otherwise
    # workers would import the training script, and torch with it.
    import cloudpickle

    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
            try:
                return cloudpickle.dumps(function)
            except Exception:  # a global that cannot be pickled: let the workers import the module after all
                pass
            finally:
                cloudpickle.unregister_pickle_by_value(module)
        return cloudpickle.dumps(function)
    except Exception as error:
        raise RewardError(
            f"reward function {name_of(function)} cannot be sent to worker processes: {error}",
            todo="let it not capture open files, locks, models or sockets; create these inside the function's module",
        ) from error


def _is_installed(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    places = [
        path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return not file or module.__name__.partition(".")[0] == "posttrain" or file.startswith(tuple(places))


def _checked(spec: RewardSpec, kept: list[WorkerProcess] | None) -> RewardSpec:
    from posttrain.rewards.crew import IMPORT_S, WorkerProcess

    worker = WorkerProcess(spec)
    try:
        found = worker.wait_until_ready(IMPORT_S)
        if kept is not None:
            kept.append(worker)
        return found
    finally:
        if not kept:
            worker.kill()
