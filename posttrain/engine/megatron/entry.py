"""The engine `megatron` among the train engines, and what its runs need of the machine and of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.config.resolved import Problem, Resolved
from posttrain.config.schema import lookup
from posttrain.engine.megatron.settings import (
    MODEL_TYPES,
    NAME,
    SECTION,
    check_megatron,
    install_words,
    is_installed,
)
from posttrain.engine.settings import ENGINES, EngineKeys, TrainEngineEntry
from posttrain.models.model_files import config_file, model_type_of


def check_megatron_environment(resolved: Resolved, cwd: Path, keys: EngineKeys) -> Iterator[Problem]:
    """The package that a run needs, and models of a kind that the engine does not train, known from their config.json
    alone: the weights of a large one take an hour to load."""
    if not is_installed():
        what = f"`{keys.strategy}=megatron`: the package megatron-core is not installed in this environment."
        yield Problem(what, resolved.where(keys.strategy), install_words(keys.strategy))
    for role in keys.roles.values():
        key = f"{role.model}.path"
        name = resolved.value(key)
        if name is None:  # a critic's is then the actor's
            continue
        kind = "qwen2" if name == "embedded" else model_type_of(str(name), cwd)
        if kind in MODEL_TYPES:
            yield from _shape_problem(resolved, cwd, keys, role.model)
        elif kind is not None:
            what = f"`{key}={name}`: models of type {kind} cannot be trained with {keys.strategy}=megatron; it trains "
            what += f"{', '.join(MODEL_TYPES)}."
            yield Problem(what, resolved.where(key), f"give another model, or set {keys.strategy}=fsdp2", (key,))


def _shape_problem(resolved: Resolved, cwd: Path, keys: EngineKeys, section: str) -> Iterator[Problem]:
    """Sizes that do not divide what they cut of the model, and models that cannot be built."""
    from transformers import AutoConfig, Qwen2Config

    from posttrain.engine.base import EngineLayout
    from posttrain.engine.megatron.model import check_model
    from posttrain.engine.megatron.package import MegatronError
    from posttrain.models.embedded import SHAPE

    name = str(resolved.value(f"{section}.path"))
    config: Any = Qwen2Config(**SHAPE) if name == "embedded" else None
    file = config_file(name, cwd) if config is None else None
    if file is not None:
        with suppress(Exception):  # what is wrong with the file is said when the model is loaded
            config = AutoConfig.from_pretrained(file.parent)
    if config is None:
        return
    for name, value in (getattr(lookup(resolved.config, section), "override_config", None) or {}).items():
        setattr(config, name, value)
    key = f"{keys.section}.{SECTION}"
    try:
        check_model(config, _parallel_sizes(EngineLayout(NAME, keys, own=resolved.value(key))))
    except MegatronError as error:
        what, _, do = str(error).rpartition("; ")
        yield Problem(f"{what}.", resolved.where(key), do, (key,))


def _parallel_sizes(layout: Any) -> Any:
    from posttrain.engine.megatron.groups import ParallelSizes  # which imports torch

    return ParallelSizes.of(layout)


ENGINES[NAME] = TrainEngineEntry(
    own_settings=SECTION,
    check=check_megatron,
    check_environment=check_megatron_environment,
    loads_on_host=True,
    sizes=_parallel_sizes,
    plan_note="Each part is that of the rank that holds most of it; activations are an estimate (docs/plan.md).",
)
