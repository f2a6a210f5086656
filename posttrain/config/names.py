"""Names of estimators, losses, samplers and engines: known, or registered by a file of the working folder."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.choices import ESTIMATORS, NOT_BUILT_VALUES, POLICY_LOSSES, ROLLOUT_ENGINES, SAMPLERS
from posttrain.config.closest import closest
from posttrain.config.merge import Entry, Merged, Source
from posttrain.config.presets import PRESETS
from posttrain.config.problem import Problem
from posttrain.config.registered import files_that_register
from posttrain.external import is_external
from posttrain.registry import registered_by

_EXTERNAL = "actor_rollout_ref.model.external_lib"
_REGISTRIES = {
    "algorithm.adv_estimator": ("advantage estimator", "register_adv_est", ESTIMATORS),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("policy loss", "register_policy_loss", POLICY_LOSSES),
    "data.sampler": ("sampler", "register_sampler", SAMPLERS),
    "actor_rollout_ref.rollout.name": ("rollout engine", "register_engine", ROLLOUT_ENGINES),
}
"""Key -> (what it names, the function that registers such a name, names known)."""
_OFTEN_MEANT = {
    ("algorithm.adv_estimator", "ppo"): "gae",
    ("algorithm.adv_estimator", "reinforce++"): "reinforce_plus_plus",
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "ppo"): "vanilla",
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "gmpo"): "geo_mean",
}
"""(key, name that others use) -> ours."""


def check_names(merged: Merged, cwd: Path) -> None:
    """Check these names. Those that the program itself has registered are known; those of a file that was loaded for
    its settings are not, as the run's other processes must load it too."""
    needed: dict[Path, str] = {}
    for key, (what, function, built_in) in _REGISTRIES.items():
        known = tuple(dict.fromkeys((*built_in, *registered_by(what, lambda module: not is_external(module)))))
        name = merged.value(key)
        if name in known or key in merged.bad or merged.value(_EXTERNAL) is not None:
            continue  # a module named by the user may register anything: it is asked when it has been imported
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
        merged.entries[_EXTERNAL] = Entry(file.name, source, _EXTERNAL)
        merged.note(f"{file.name} registers the {why} and is loaded; {_EXTERNAL}={file.stem} says the same.")
    elif needed:
        names = " and ".join(f"{why} in {file.name}" for file, why in needed.items())
        do = f"set {_EXTERNAL} to one file that imports both"
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
    do = f'{hint}If it is your own (@{function}("{name}")), name its file: {_EXTERNAL}=FILE'
    return Problem(text, merged.where(key), do, (key,))
