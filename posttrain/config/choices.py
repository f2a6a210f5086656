"""Settings whose value is one of a few names, the names of what is built in, and the presets.

Names are read from where each is declared. `preset=embedded` is the small task that runs anywhere; `algorithm=grpo`,
`algorithm=dapo`, ... are declared by the algorithms' files. `scripts/generate.py` writes the presets to the YAML
tree. A file of the working folder that registers a name is found by reading the files, without running them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.algorithms.correction import REJECTIONS as REJECTIONS
from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.algorithms.registry import POLICY_LOSSES as _LOSSES
from posttrain.config.merge import Entry, Merged
from posttrain.config.schema import KINDS, place_declared_settings
from posttrain.errors import UserError
from posttrain.external import import_external, is_external
from posttrain.registry import built_in_names, registered_by
from posttrain.spelling import closest

_estimators = {name: estimator for name, estimator in ADV_ESTIMATORS.items() if estimator.is_built_in}
_losses = {name: loss for name, loss in _LOSSES.items() if loss.is_built_in}
ESTIMATORS, POLICY_LOSSES = tuple(_estimators), tuple(_losses)
# Estimators that compare the responses of one prompt: they need `rollout.n` above 1.
GROUP_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.compares_group)
CRITIC_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.needs_critic)
ROLLOUT_ENGINES = built_in_names("rollout/engines.py", "register_engine")
WEIGHT_SYNCS = ("auto", *built_in_names("workers/weight_transport.py", "register_transport"))
DEFAULT_GROUP_SIZE = 5

SAMPLERS = built_in_names("data/sampler.py", "register_sampler")
# `console` is the line that a run prints per step; it needs no logger.
LOGGERS = ("console", *built_in_names("tracking/loggers.py", "register_logger"))
# Each is a logger, a package on the index and an extra of posttrain by the same name.
LOGGER_PACKAGES = tuple(name for name in LOGGERS if name not in ("console", "details"))

# Values that are known names elsewhere, with the answer that they get here.
NOT_BUILT_VALUES: dict[tuple[str, str], str] = {
    **{
        ("actor_rollout_ref.rollout.name", name): "this engine is not built; set actor_rollout_ref.rollout.name=native"
        for name in ("trtllm", "dynamo")
    },
    ("trainer.device", "npu"): "Ascend devices need the torch_npu plug-in, which this version does not use; "
    "set trainer.device=auto, cpu or cuda",
}


_ACTOR = "actor_rollout_ref.actor"

EMBEDDED: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "embedded",
    "data.val_files": "embedded",
    "data.train_batch_size": 200,
    "data.max_prompt_length": 32,
    "data.max_response_length": 4,
    "actor_rollout_ref.model.path": "embedded",
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.ppo_mini_batch_size": 50,
    f"{_ACTOR}.optim.lr": 5e-4,
    f"{_ACTOR}.optim.lr_warmup_steps": 10,
    f"{_ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{_ACTOR}.optim.min_lr_ratio": 0.1,
    f"{_ACTOR}.clip_ratio_high": 0.4,
    f"{_ACTOR}.use_kl_loss": False,
    "trainer.total_epochs": 1000,
    "trainer.total_training_steps": 200,
    "trainer.test_freq": 10,
    "tracking.samples_freq": 10,
    "trainer.project_name": "embedded",
    "trainer.export_hf": "last",
}

# Those that are not set take the embedded task's value when neither model nor data is named.
EMBEDDED_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size",
)

# Group file -> (sentence, values by canonical key).
PRESETS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "preset/embedded": ("The small task that posttrain makes itself: minutes on a CPU, nothing to download.", EMBEDDED),
    **dict(
        sorted(
            (f"algorithm/{name}", preset)
            for declaration in (*_estimators.values(), *_losses.values())
            for name, preset in declaration.presets.items()
        )
    ),
}


EXTERNAL = "actor_rollout_ref.model.external_lib"
# Key -> (what it names, the function that registers such a name, names known).
_REGISTRIES = {
    "algorithm.adv_estimator": ("advantage estimator", "register_adv_est", ESTIMATORS),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("policy loss", "register_policy_loss", POLICY_LOSSES),
    "data.sampler": ("sampler", "register_sampler", SAMPLERS),
    "actor_rollout_ref.rollout.name": ("rollout engine", "register_engine", ROLLOUT_ENGINES),
    "actor_rollout_ref.rollout.weight_sync": ("weight transport", "register_transport", WEIGHT_SYNCS),
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
            merged.refuse(f"`{key}={name}` cannot be used.", merged.where(key), NOT_BUILT_VALUES[key, name], key)
        else:
            _refuse_unknown(merged, key, name, what, function, known, files)
    if len(needed) == 1:
        file, why = next(iter(needed.items()))
        source = f"found in the working folder ({why})"
        merged.entries[EXTERNAL] = Entry(file.name, EXTERNAL, source, explicit=False)
        merged.note(f"{file.name} registers the {why} and is loaded; {EXTERNAL}={file.stem} says the same.")
    elif needed:
        names = " and ".join(f"{why} in {file.name}" for file, why in needed.items())
        do = f"set {EXTERNAL} to one file that imports both"
        merged.refuse(f"Two files would have to be loaded: {names}.", "working folder", do)


def _refuse_unknown(
    merged: Merged, key: str, name: str, what: str, function: str, known: tuple[str, ...], files: list[Path]
) -> None:
    close = _OFTEN_MEANT.get((key, name)) or closest(name, known)
    hint = f"did you mean `{close}`? " if close else ""
    if key == "algorithm.adv_estimator" and f"algorithm/{name}" in PRESETS and not close:
        hint = f"`{name}` is a preset: write `algorithm={name}`, which sets the estimator too. "
    text = f"`{key}={name}`: unknown {what}; known: {', '.join(known)}."
    if files:
        text += f" Several files register it: {', '.join(file.name for file in files)}."
    do = f'{hint}If it is your own (@{function}("{name}")), name its file: {EXTERNAL}=FILE'
    merged.refuse(text, merged.where(key), do, key)


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
                failures[str(error).removesuffix(".") + "."] = None
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
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and function in (getattr(call.func, "id", ""), getattr(call.func, "attr", "")):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(isinstance(argument, ast.Constant) and argument.value == name for argument in arguments):
                return True
    return False
