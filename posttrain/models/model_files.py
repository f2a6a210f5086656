"""Checks folders and hub ids of models before anything is loaded: files that are cut off, missing or of another kind.

Reads headers, not weights, and imports no torch. `why_not_from_hub` finds out whether a model can be fetched from the
hub; without a connection it answers at once, not after retries.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.config.model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SCORE_HEADS, read_adapter_config
from posttrain.config.resolved import Problem, Resolved
from posttrain.config.supervised import RewardTrainerConfig
from posttrain.errors import UserError
from posttrain.spelling import closest

OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
)
"""Files that hold one JSON object; `tokenizer.json` does too, and may be too long to be read twice."""
_POINTER = b"version https://git-lfs"
_SIZE = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # the format's own limit


def broken_files(folder: Path) -> list[str]:
    """What is wrong with the files of a model folder, one sentence each."""
    return list(_problems(folder))


def _problems(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        if _is_pointer(path):
            yield f"{path.name} is a git-lfs pointer, not the file itself (fetch it with `git lfs pull`)"
        elif path.name in OBJECTS:
            yield from _object_problem(path)
        elif path.name == "tokenizer.json" and _first_character(path) != b"{":
            yield f"{path.name} holds no JSON object"
        elif path.suffix == ".safetensors" and (problem := _weights_problem(path)):
            yield f"{path.name} {problem}"


def _is_pointer(path: Path) -> bool:
    if path.stat().st_size > 1024:
        return False
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _object_problem(path: Path) -> Iterator[str]:
    content = read_object(path)
    if isinstance(content, str):
        yield f"{path.name} {content}"
    elif path.name.endswith(".index.json"):
        named = content.get("weight_map")
        if not isinstance(named, dict):
            yield f"{path.name} has no `weight_map`"
            return
        missing = sorted({str(name) for name in named.values() if not (path.parent / str(name)).is_file()})
        if missing:
            yield f"{path.name} names files that are not there: {', '.join(missing[:4])}"


def read_object(path: Path) -> dict[str, Any] | str:
    """The JSON object in a file, or what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return content if isinstance(content, dict) else f"holds a {type(content).__name__}, not a JSON object"


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _weights_problem(path: Path) -> str | None:
    """A safetensors file is 8 bytes with the length of a JSON header, the header, and the tensors that it describes."""
    size = path.stat().st_size
    if size < _SIZE.size:
        return f"has {size} bytes: it holds no weights"
    with path.open("rb") as file:
        (length,) = _SIZE.unpack(file.read(_SIZE.size))
        if length > _LONGEST_HEADER:
            return "is no safetensors file (its header would be longer than any)"
        header = file.read(length)
    if len(header) < length:
        return f"was cut off: it has {size} bytes, and its header alone needs {length + _SIZE.size}"
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        wanted = _SIZE.size + length + max(ends, default=0)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return "is no safetensors file (its header cannot be read)"
    return None if size == wanted else f"was cut off or changed: it has {size} bytes instead of {wanted}"


def model_type_of(name: str, cwd: Path) -> str | None:
    """`model_type` of a folder or a hub id, of which config.json alone is fetched; None where it cannot be read."""
    path = config_file(name, cwd)
    content = read_object(path) if path is not None else None
    kind = content.get("model_type") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) else None


def config_file(name: str, cwd: Path) -> Path | None:
    """config.json of a folder or a hub id, which is fetched alone; None where there is none."""
    folder = cwd / name
    path = folder / "config.json" if folder.is_dir() else _from_hub(name)
    return path if path is not None and path.is_file() else None


def _from_hub(name: str) -> Path | None:
    if why_not_from_hub(name) is not None:
        return None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception:  # loading the model reports what is wrong with the name or the connection
        return None


PATIENCE_S = 5.0
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def why_not_from_hub(name: str) -> str | None:
    """Why a model that is no local folder cannot be loaded, as the end of a sentence; None if nothing is known against
    it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.iterdir()):
        return None
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE forbids access to the hub"
    return None if _answers(constants.ENDPOINT) else f"the hub {constants.ENDPOINT} cannot be reached"


@functools.cache
def _answers(endpoint: str) -> bool:
    """Whether a server accepts connections at this address; behind a proxy this is assumed."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return True
    url = urlsplit(endpoint)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=PATIENCE_S).close()
            reached.set()
        except OSError:
            pass

    asking = threading.Thread(target=connect, daemon=True)  # resolving a name knows no timeout of its own
    asking.start()
    asking.join(PATIENCE_S)
    return reached.is_set()


class ModelError(UserError):
    """A model or tokenizer could not be loaded; the text says what to do."""


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def local_or_hub(path: str, setting: str = "model.path", holds: tuple[str, ...] = ("config.json",)) -> str:
    """Expand ~ and $VARS in a path. A missing folder is distinguished from a hub id.

    A folder must hold one of the files `holds`.
    """
    expanded = os.path.expandvars(os.path.expanduser(path))
    if Path(expanded).is_dir():
        if "config.json" in holds and is_adapter(Path(expanded)):
            raise ModelError(
                f"{setting}={path}: the folder holds a LoRA adapter, not a model; give its base as the model and this "
                "folder as model.lora_adapter_path, or name the run's checkpoint (.../global_step_N)"
            )
        if not any((Path(expanded) / name).exists() for name in holds):
            raise ModelError(f"{setting}={path}: the folder holds no config.json; give the folder of a model")
        if broken := broken_files(Path(expanded)):
            raise ModelError(f"{setting}={path}: {'; '.join(broken)}. Fetch or copy the model again.")
        return expanded
    looks_local = expanded.startswith(("/", ".", "~")) or expanded.count("/") > 1 or "\\" in expanded
    if looks_local or Path(expanded).exists():
        raise ModelError(f"{setting}={path}: no such folder; give one, or a hub id such as Qwen/Qwen2.5-0.5B")
    if (reason := why_not_from_hub(expanded)) is not None:
        raise ModelError(
            f"{setting}={path} is neither a folder here nor a model in the hub's cache, and {reason}.\n"
            f"  Give a local folder, such as /path/to/{Path(path).name} "
            "(HF_ENDPOINT names a mirror, HF_TOKEN gives access to private models)."
        )
    return expanded


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
    """A hint at a folder beside the missing one that has a similar name."""
    try:
        near = closest(path.name, [folder.name for folder in path.parent.iterdir() if folder.is_dir()])
    except OSError:
        return ""
    return f"did you mean `{path.parent / near}`? " if near else ""


def _lacks_tokenizer(resolved: Resolved, key: str, folder: Path) -> bool:
    """Without this check transformers would silently make an empty tokenizer of the model's kind."""
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
