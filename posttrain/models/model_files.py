"""A model folder checked before anything is loaded: files that were cut off, never fetched, or are something else.

Costs a read of headers, not of weights, and imports no torch. `why_not_from_hub` says whether a model can come from the
hub; without a connection that is known in a moment, not after retries.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    except Exception:  # what is wrong with the name or the connection is said when the model is loaded
        return None


PATIENCE_S = 5.0
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def why_not_from_hub(name: str) -> str | None:
    """Why a model that is no local folder cannot be loaded, as the end of a sentence; None if it may well be."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.iterdir()):
        return None
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE forbids to ask the hub"
    return None if _answers(constants.ENDPOINT) else f"the hub {constants.ENDPOINT} cannot be reached"


@functools.cache
def _answers(endpoint: str) -> bool:
    """Whether somebody listens at this address; behind a proxy only a download can tell."""
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
