"""Folders and hub ids that the settings of a run name as models, tokenizers and adapters; checked without torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from posttrain.config.model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SCORE_HEADS, read_adapter_config
from posttrain.config.resolved import Problem, Resolved
from posttrain.config.supervised import RewardTrainerConfig
from posttrain.models.model_files import broken_files, why_not_from_hub
from posttrain.spelling import closest

_MODEL = "actor_rollout_ref.model"
_REWARD_MODEL = tuple(f"reward_model.model.{name}" for name in ("path", "tokenizer_path", "input_tokenizer"))
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]:
    """Models that are not there or were cut off, and adapters that cannot be trained on."""
    model = _MODEL if hasattr(resolved.config, "actor_rollout_ref") else "model"
    yield from _check_folders(resolved, folder, model)
    yield from _check_adapters(resolved, folder, model)


def _check_folders(resolved: Resolved, cwd: Path, model: str) -> Iterator[Problem]:
    others = ("critic.model.path", *_REWARD_MODEL) if model == _MODEL else ()
    for key in (f"{model}.path", f"{model}.tokenizer_path", *others):
        name = resolved.value(key)
        if name is None or name == "embedded":
            continue
        path, where = cwd / name, resolved.where(key)
        if path.is_dir():
            wanted = "tokenizer_config.json" if "tokenizer" in key else "config.json"
            if wanted == "config.json" and not (path / wanted).is_file() and (path / ADAPTER_CONFIG).is_file():
                what = f"`{key}`: the folder {name} holds a LoRA adapter, not a model."
                yield Problem(what, where, f"set {key} to its base model, and {model}.lora_adapter_path={name}")
            elif not (path / wanted).is_file():
                what = f"`{key}`: the folder {name} holds no {wanted}."
                yield Problem(what, where, "give a folder in Hugging Face format")
            elif key in (f"{model}.path", _REWARD_MODEL[0]) and _lacks_tokenizer(resolved, key, path):
                what = f"`{key}`: the folder {name} holds no tokenizer."
                elsewhere = key.removesuffix("path") + "tokenizer_path"
                do = f"copy tokenizer.json and tokenizer_config.json into it, or set {elsewhere}"
                yield Problem(what, where, do)
            for problem in broken_files(path):
                yield Problem(f"`{key}`: in {name}, {problem}.", where, "fetch or copy the model again")
        elif name.startswith((".", "/", "~")) or not _HUB_ID.match(name):
            do = "give a folder that exists, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or `embedded`"
            yield Problem(f"`{key}`: the folder {name} does not exist.", where, _similar_folder(path) + do)
        elif (reason := why_not_from_hub(name)) is not None:
            do = "give a folder that exists, or download the model where there is a connection"
            what = f"`{key}`: {name} is neither a folder here nor a model in the hub's cache, and {reason}."
            yield Problem(what, where, _similar_folder(path) + do)


def _similar_folder(path: Path) -> str:
    """A hint at a folder beside the missing one whose name is a slip away."""
    try:
        near = closest(path.name, [folder.name for folder in path.parent.iterdir() if folder.is_dir()])
    except OSError:
        return ""
    return f"did you mean `{path.parent / near}`? " if near else ""


def _lacks_tokenizer(resolved: Resolved, key: str, folder: Path) -> bool:
    """transformers would make an empty tokenizer of the model's kind, and say nothing."""
    elsewhere = resolved.value(key.removesuffix("path") + "tokenizer_path") is not None
    return not elsewhere and not any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _check_adapters(resolved: Resolved, cwd: Path, model: str) -> Iterator[Problem]:
    heads = SCORE_HEADS if isinstance(resolved.config, RewardTrainerConfig) else ()  # these may be stored whole
    path = f"{model}.lora_adapter_path"
    name = resolved.value(path)
    found = read_adapter_config(cwd / name, heads) if name is not None else None
    if isinstance(found, str):
        do = f"give a local folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft's save_pretrained writes them"
        yield Problem(f"`{path}`: {found}.", resolved.where(path), do)
    key = f"{model}.quantization"
    if resolved.value(key) is not None and importlib.util.find_spec("bitsandbytes") is None:
        what = f"`{key}={resolved.value(key)}`: the package bitsandbytes is not installed."
        do = f'pip install "posttrain[qlora]" (or bitsandbytes), or remove {key}'
        yield Problem(what, resolved.where(key), do)
