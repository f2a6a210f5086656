"""Names of estimators, losses, samplers and engines: known, or registered by a file of the user's own.

A file of the working folder that registers a name is found by reading the files, without running them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.config.choices import ESTIMATORS, NOT_BUILT_VALUES, POLICY_LOSSES, PRESETS, ROLLOUT_ENGINES, SAMPLERS
from posttrain.config.merge import Entry, Merged, Source
from posttrain.config.problem import Problem
from posttrain.config.schema import KINDS, place_declared_settings
from posttrain.errors import UserError
from posttrain.external import import_external, is_external
from posttrain.registry import registered_by
from posttrain.spelling import closest

EXTERNAL = "actor_rollout_ref.model.external_lib"
# Key -> (what it names, the function that registers such a name, names known).
_REGISTRIES = {
    "algorithm.adv_estimator": ("advantage estimator", "register_adv_est", ESTIMATORS),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("policy loss", "register_policy_loss", POLICY_LOSSES),
    "data.sampler": ("sampler", "register_sampler", SAMPLERS),
    "actor_rollout_ref.rollout.name": ("rollout engine", "register_engine", ROLLOUT_ENGINES),
}
# (key, name that others use) -> ours.
_OFTEN_MEANT = {
    ("algorithm.adv_estimator", "ppo"): "gae",
    ("algorithm.adv_estimator", "reinforce++"): "reinforce_plus_plus",
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "ppo"): "vanilla",
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "gmpo"): "geo_mean",
}


def check_names(merged: Merged, cwd: Path) -> None:
    """Check these names. Those that the program itself has registered are known; those of a file that was loaded for
    its settings are not, as the run's other processes must load it too."""
    needed: dict[Path, str] = {}
    for key, (what, function, built_in) in _REGISTRIES.items():
        known = tuple(dict.fromkeys((*built_in, *registered_by(what, lambda module: not is_external(module)))))
        name = merged.value(key)
        if name in known or key in merged.bad or merged.value(EXTERNAL) is not None:
            continue  # a module named by the user may register anything: it is asked when it has been imported
        if key == "data.sampler" and ":" in str(name):
            continue  # a class or function of a file
        files = files_that_register(name, function, cwd)
        if len(files) == 1:
            needed[files[0]] = f"{what} `{name}`"
        elif (key, name) in NOT_BUILT_VALUES:
            do = NOT_BUILT_VALUES[key, name]
            merged.problems.append(Problem(f"`{key}={name}` cannot be used.", merged.where(key), do, (key,)))
        else:
            merged.problems.append(_unknown(merged, key, name, what, function, known, files))
    if len(needed) == 1:
        file, why = next(iter(needed.items()))
        source = Source(f"found in the working folder ({why})", -1, explicit=False)
        merged.entries[EXTERNAL] = Entry(file.name, source, EXTERNAL)
        merged.note(f"{file.name} registers the {why} and is loaded; {EXTERNAL}={file.stem} says the same.")
    elif needed:
        names = " and ".join(f"{why} in {file.name}" for file, why in needed.items())
        do = f"set {EXTERNAL} to one file that imports both"
        merged.problems.append(Problem(f"Two files would have to be loaded: {names}.", "working folder", do))


def _unknown(
    merged: Merged, key: str, name: str, what: str, function: str, known: tuple[str, ...], files: list[Path]
) -> Problem:
    close = _OFTEN_MEANT.get((key, name)) or closest(name, known)
    hint = f"did you mean `{close}`? " if close else ""
    if key == "algorithm.adv_estimator" and f"algorithm/{name}" in PRESETS and not close:
        hint = f"`{name}` is a preset: write `algorithm={name}`, which sets the estimator too. "
    text = f"`{key}={name}`: unknown {what}; known: {', '.join(known)}."
    if files:
        text += f" Several files register it: {', '.join(file.name for file in files)}."
    do = f'{hint}If it is your own (@{function}("{name}")), name its file: {EXTERNAL}=FILE'
    return Problem(text, merged.where(key), do, (key,))


def load_own_algorithms(given: Mapping[str, Any], unknown: Iterable[str], folder: Path) -> list[str]:
    """Import the file that registers an estimator or a loss of the user's own, as its settings must be known.

    given: the values of `EXTERNAL` and of the keys that name an algorithm. unknown: keys that are no settings so far.
    Returns a sentence on each file that cannot be imported. One that does not exist is reported by the checks.
    """
    failures: dict[str, None] = {}
    for kind in KINDS:
        name, file = given.get(kind.key), given.get(EXTERNAL)
        if name in kind.registry and not any(key.startswith(kind.prefix) for key in unknown):
            continue
        if file is None:
            found = files_that_register(str(name), kind.decorator, folder)
            file = str(found[0]) if len(found) == 1 else None
        if not isinstance(file, str) or (file.endswith(".py") and not (folder / file).is_file()):
            continue
        try:
            import_external(str(folder / file) if file.endswith(".py") else file)
        except UserError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError) or error.__cause__.name != file:
                failures[f"{error}."] = None
    place_declared_settings()
    return list(failures)


def files_that_register(name: str, function: str, folder: Path) -> list[Path]:
    """Python files directly in `folder` that call (or decorate with) `function(name)`."""
    found = []
    for file in sorted(folder.glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        # A look at the text first: most files need not be parsed.
        if name in text and function in text and _registers(text, name, function):
            found.append(file)
    return found


def _registers(text: str, name: str, function: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(_name_of_called(call) == function and name in _texts(call) for call in calls)


def _name_of_called(call: ast.Call) -> str | None:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", None)


def _texts(call: ast.Call) -> list[object]:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
