"""Checks against this machine: files, folders, packages, devices. Run before torch is imported."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from posttrain import cores
from posttrain.config.closest import closest
from posttrain.config.data import HELD_OUT
from posttrain.config.devices import gpus_present, runs_on_cpu
from posttrain.config.engine_kwargs import OUTSIDE, source_of
from posttrain.config.hub import why_not_from_hub
from posttrain.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from posttrain.config.model_files import broken_files
from posttrain.config.outside import KEY
from posttrain.config.parallel import ROLLOUT_WORKERS, TORCHRUN, rollout_workers_of, workers_of
from posttrain.config.problem import Problem
from posttrain.config.resolved import Resolved
from posttrain.config.train_engines import SUPERVISED, check_engine_environment

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REWARD_MODEL = tuple(f"reward_model.model.{name}" for name in ("path", "tokenizer_path", "input_tokenizer"))
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")
_HOW_TO_GIVE_A_CLUSTER = (
    "give the command on every machine, on the first with RAY_HEAD_ADDRESS=auto trainer.node_rank=0, on the others "
    "with RAY_HEAD_ADDRESS=HOST:6379 trainer.node_rank=1, ...; or by torchrun --nnodes=N --node_rank=0 "
    "--master_addr=HOST; or once, on a running Ray cluster (ray start --head on one machine, ray start "
    "--address=HOST:6379 on the others), with RAY_ADDRESS=HOST:6379"
)
RECIPES = ("math", "math500", "mbpp", "humaneval", "nq_open", "hotpotqa", "banking77", "hh_rlhf", "hh_rlhf_sft")
"""Data sets, besides gsm8k, that `posttrain data NAME` makes in a folder of their name."""


def check_environment(resolved: Resolved, cwd: Path | None = None) -> list[Problem]:
    """Everything on this machine that would stop the run."""
    folder = cwd or Path.cwd()
    return [problem for examine in _CHECKS for problem in examine(resolved, folder)]


def check_on_any_machine(resolved: Resolved) -> list[Problem]:
    """Those of them that do not depend on the machine: `posttrain plan` may plan for another one."""
    return [
        problem for examine in (_engine_over_devices, check_parallel_rollout) for problem in examine(resolved, Path())
    ]


def check_supervised_environment(
    resolved: Resolved, cwd: Path | None = None, heads: Sequence[str] = ()
) -> list[Problem]:
    """The same for the supervised trainers, whose model lies at `model`; adapters may hold `heads` whole."""
    folder = cwd or Path.cwd()
    return [
        *_data_files(resolved, folder, held_out=False),
        *_model_folders(resolved, folder, "model"),
        *_adapters(resolved, folder, "model", heads),
        *_own_code(resolved, folder, ("model.external_lib",)),
        *check_engine_environment(resolved, folder, SUPERVISED),
        *check_workers(resolved, folder),
        *_folders(resolved, folder),
    ]


def _data_files(resolved: Resolved, cwd: Path, *, held_out: bool = True) -> Iterator[Problem]:
    """`held_out`: whether the trainer can hold out rows of its own."""
    for key in ("data.train_files", "data.val_files"):
        value = resolved.value(key)
        for name in value if isinstance(value, list) else [value]:
            if name is None or name == "embedded" or (held_out and key == "data.val_files" and name == HELD_OUT):
                continue
            path = cwd / str(name)
            if path.is_file() and path.name.endswith(_SUFFIXES):
                continue
            where = resolved.where(key)
            if path.is_file():
                what = f"`{key}`: {name} is not a data file by its suffix."
                yield Problem(what, where, f"give one of {', '.join(_SUFFIXES)}")
            elif path.is_dir():
                inside = ", ".join(sorted(file.name for file in path.iterdir() if file.name.endswith(_SUFFIXES))[:5])
                do = f"name its files: it holds {inside}" if inside else f"it holds none of {', '.join(_SUFFIXES)}"
                yield Problem(f"`{key}`: {name} is a folder, not a file.", where, do)
            else:
                yield Problem(f"`{key}`: the file {name} does not exist.", where, _how_to_make(str(name)))


def _how_to_make(name: str) -> str:
    folder = os.path.dirname(name) or "."
    if (recipe := os.path.basename(folder)) in RECIPES:
        return f"`posttrain data {recipe} --out {folder}` makes it"
    if "gsm8k" in name.lower():
        return f"`posttrain data gsm8k --out {folder}` makes it (or python examples/data_preprocess/gsm8k.py)"
    return "give a parquet, json or jsonl file that exists; a relative path is taken from the working folder"


def _model_folders(resolved: Resolved, cwd: Path, model: str = _MODEL) -> Iterator[Problem]:
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


def _adapters(resolved: Resolved, cwd: Path, model: str = _MODEL, heads: Sequence[str] = ()) -> Iterator[Problem]:
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


def _own_code(
    resolved: Resolved, cwd: Path, keys: Sequence[str] = ("custom_reward_function.path", f"{_MODEL}.external_lib")
) -> Iterator[Problem]:
    for key in keys:
        name = resolved.value(key)
        if name is None:
            continue
        if name.startswith(("http://", "https://")):
            continue  # a reward server; it is asked when the reward is loaded
        if name.endswith(".py") and not (cwd / name).is_file():
            what = f"`{key}`: the file {name} does not exist."
            yield Problem(what, resolved.where(key), "give a Python file that exists")
        elif not name.endswith(".py") and not _module_exists(name, cwd):
            do = "give a .py file, or a dotted path that lies in the working folder or is installed"
            yield Problem(f"`{key}`: no module {name} was found.", resolved.where(key), do)


def _module_exists(name: str, cwd: Path) -> bool:
    """Whether the first part of a dotted path is a file or folder here, or an installed module."""
    first = name.split(".")[0].split(":")[0]
    if (cwd / f"{first}.py").is_file() or (cwd / first).is_dir():
        return True
    try:
        return importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        return False


def _rollout_engine(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    engine = OUTSIDE.get(resolved.value(f"{_ROLLOUT}.name"))
    if engine is None:
        return
    if not engine.is_installed():
        what = f"`{_ROLLOUT}.name={engine.name}`: the package {engine.name} is not installed in this environment."
        yield Problem(what, resolved.where(f"{_ROLLOUT}.name"), engine.install)
    elif (given := engine.given(resolved.value(KEY))) and (known := engine.installed_arguments()) is not None:
        yield from (Problem(what, source_of(resolved.where(KEY)), do) for what, do in engine.unknown(given, known))


def _engine_over_devices(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    engine, key = OUTSIDE.get(resolved.value(f"{_ROLLOUT}.name")), f"{_ROLLOUT}.tensor_model_parallel_size"
    if engine is not None and not engine.by_teams and (size := resolved.value(key)) > 1:
        what = f"`{key}={size}`: a {engine.title} engine over several devices is not built; every worker has one of "
        what += "its own, with the whole model in it."
        do = f"set {key}=1 (`posttrain plan` says whether a device holds the model), or {_ROLLOUT}.name=native"
        yield Problem(what, resolved.where(key), do)


def check_workers(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    key, nodes = "trainer.n_gpus_per_node", resolved.value("trainer.nnodes")
    on_cpu, present = runs_on_cpu(resolved.config), gpus_present()
    generating = rollout_workers_of(resolved.config)
    by_torchrun = resolved.where("trainer.nnodes") == TORCHRUN
    addresses = [os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_HEAD_ADDRESS") if os.environ.get(name)]
    in_cluster = (nodes > 1 or (generating > 0 and not on_cpu)) and bool(addresses) and not by_torchrun
    most = cores.usable() if on_cpu else present
    here, count = resolved.value(key) + math.ceil(generating / max(nodes, 1)), workers_of(resolved.config) + generating
    if here > max(most, 1) and not in_cluster:  # without any GPU the device is wrong, and reported
        yield _too_many(resolved, key, generating, f"{most} CPU core(s)" if on_cpu else f"{present} GPU(s)", most)
    elif count > 1 and importlib.util.find_spec("ray") is None:
        several, none = (ROLLOUT_WORKERS, 0) if generating else (key, 1)
        asked = f"`{several}={resolved.value(several)}` asks for {count} workers"
        what = f"{asked}, which Ray starts; the package ray is not installed."
        yield Problem(what, resolved.where(several), f'pip install "posttrain[ray]", or set {several}={none}')
    if nodes > 1 and not (in_cluster or by_torchrun):
        what = f"`trainer.nnodes={nodes}` asks for {nodes} machines, but no cluster or head address is given."
        yield Problem(what, resolved.where("trainer.nnodes"), _HOW_TO_GIVE_A_CLUSTER)
    if in_cluster and resolved.node_rank and addresses[:1] == ["auto"]:
        what = f"`trainer.node_rank={resolved.node_rank}` joins machine 0, and `auto` does not say where that is."
        do = "set RAY_HEAD_ADDRESS=HOST:6379, as the command of machine 0 prints it"
        yield Problem(what, "environment variable RAY_HEAD_ADDRESS", do)
    if resolved.value("trainer.device") == "cuda" and present == 0:
        what = "`trainer.device=cuda`, but this machine shows no GPU."
        yield Problem(what, resolved.where("trainer.device"), "set trainer.device=auto or cpu")


def _too_many(resolved: Resolved, key: str, generating: int, present: str, most: int) -> Problem:
    where, wanted, limit = resolved.where(key), resolved.value(key), max(most, 1)
    if generating:
        asked = f"`{ROLLOUT_WORKERS}={generating}` asks for so many workers beside the {wanted} that train (`{key}`)"
        do = f"set both to {limit} or less together, or {ROLLOUT_WORKERS}=0: then the same workers do both"
        return Problem(f"{asked}; this machine has {present}.", resolved.where(ROLLOUT_WORKERS), do)
    setting = "--nproc_per_node" if where == TORCHRUN else key
    what = f"`{key}={wanted}` asks for {wanted} workers; this machine has {present}."
    return Problem(what, where, f"set {setting} to {limit} or less")


def check_parallel_rollout(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    training = ("trainer.n_gpus_per_node", "trainer.nnodes")
    keys = (ROLLOUT_WORKERS,) if rollout_workers_of(resolved.config) else training
    counts = [resolved.value(key) for key in keys]
    size, workers = resolved.value(f"{_ROLLOUT}.tensor_model_parallel_size"), math.prod(counts)
    engine = OUTSIDE.get(resolved.value(f"{_ROLLOUT}.name"))
    if size > 0 and workers % size and (engine is None or engine.by_teams):  # else only size 1 is allowed
        parallel = f"{_ROLLOUT}.tensor_model_parallel_size"
        product = f"{' x '.join(map(str, counts))} = {workers}" if len(counts) > 1 else str(workers)
        what = f"`{parallel}={size}` does not divide the {product} worker(s)."
        yield Problem(what, resolved.where(parallel), f"set a divisor of {' x '.join(keys)}")
    elif size > 1 and resolved.value(f"{_ROLLOUT}.name") == "hf":
        parallel = f"{_ROLLOUT}.tensor_model_parallel_size"
        what = f"`{parallel}={size}`: an engine `hf` cannot be held by several workers; each has one of its own."
        yield Problem(what, resolved.where(parallel), f"set {parallel}=1, or {_ROLLOUT}.name=native")


def _folders(resolved: Resolved, cwd: Path) -> Iterator[Problem]:
    key = "trainer.default_local_dir"
    target = (cwd / resolved.value(key)).absolute()
    present = next(folder for folder in (target, *target.parents) if folder.exists())
    if not present.is_dir() or not os.access(present, os.W_OK | os.X_OK):
        what = f"`{key}={resolved.value(key)}` cannot be written: {present} is no folder that you may write to."
        yield Problem(what, resolved.where(key), f"set {key} to a folder that you may write to")
    resume = resolved.value("trainer.resume_from_path")
    if resume is not None and resolved.value("trainer.resume_mode") == "resume_path" and not (cwd / resume).is_dir():
        what = f"`trainer.resume_from_path`: the folder {resume} does not exist."
        yield Problem(what, resolved.where("trainer.resume_from_path"), "give a folder .../checkpoints/global_step_N")


_CHECKS: list[Callable[[Resolved, Path], Iterator[Problem]]] = [
    _data_files,
    _model_folders,
    _adapters,
    _own_code,
    _rollout_engine,
    _engine_over_devices,
    check_engine_environment,
    check_workers,
    check_parallel_rollout,
    _folders,
]
