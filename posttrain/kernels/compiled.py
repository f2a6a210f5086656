"""Compiles the CPU kernels at first use and caches the library; without a compiler torch equivalents are used.

The library needs nothing but a C++ compiler on Linux (`CXX`, `c++`, `g++` or `clang++`): no torch headers, no build at
installation. It uses the OpenMP threads that torch already runs. POSTTRAIN_COMPILE=0 switches it off.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from posttrain.cache import cache_folder
from posttrain.errors import first_line

FOLDER = Path(__file__).parent / "cpu"
SOURCES = ("decode.cpp", "step.cpp", "train.cpp")
# No flag lets the compiler reorder a sum (no -ffast-math); only the source does, where it says so.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
# Seconds of waiting for another process's compiler until a message is printed, and until it is given up.
TELL_S, WAIT_S = 10.0, 180.0
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "paged_attention": [_POINTER] * 16,
    "add_rms_norm": [_POINTER] * 4 + [_LONG, _LONG, _FLOAT, _INT],
    "silu_mul": [_POINTER] * 2 + [_LONG, _LONG, _INT],
    "sample": [_POINTER] * 7 + [_LONG, _LONG, _INT],
    "token_log_probs": [_POINTER] * 2 + [_FLOAT] + [_POINTER] * 3 + [_LONG, _LONG, _INT],
    "run_layers": [_POINTER] * 9,
    "run_steps": [_POINTER] * 7,
    "pack": [_POINTER] * 2 + [_LONG, _LONG, _INT, _INT],
    "can_multiply": [],
}
_TRAIN_SIGNATURES = {  # float32 only
    "train_attention": [_POINTER] * 7,
    "train_attention_backward": [_POINTER] * 11,
    "norm_forward": [_POINTER] * 4 + [_LONG, _LONG, _FLOAT, _INT],
    "norm_backward": [_POINTER] * 7 + [_LONG, _LONG, _INT],
    "split_heads": [_POINTER] * 7,
    "join_heads": [_POINTER] * 7,
    "gate_backward": [_POINTER] * 4 + [_LONG, _LONG, _INT],
    "ordered_product": [_POINTER] * 4 + [_LONG] * 4 + [_INT, _INT],
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class AttentionLayout(ctypes.Structure):
    """The numbers of one call of `paged_attention`; `Layout` in decode.cpp."""

    _fields_ = (
        *((name, _LONG) for name in ("tokens", "tiles", "table_width")),
        *((name, ctypes.c_int32) for name in ("query_heads", "key_heads", "size", "window", "threads")),
        *((name, _FLOAT) for name in ("scale", "epsilon")),
        *((f"{kind}{part}_stride", _LONG) for kind in ("query", "key", "value") for part in ("", "_head")),
        ("sinks", _POINTER),  # none, and no cap, where they are left out
        ("cap", _FLOAT),
    )


def kernel(name: str, tensor: torch.Tensor):
    """The compiled function for the type of `tensor`, or None if the torch equivalent must be used."""
    if tensor.device.type != "cpu" or tensor.dtype not in _SUFFIXES:
        return None
    functions = _functions()
    return functions.get(f"{name}_{_SUFFIXES[tensor.dtype]}") if functions else None


def can_compile(dtype: torch.dtype) -> bool:
    """Whether CPU tensors of this type have compiled functions."""
    return dtype in _SUFFIXES and _functions() is not None


def why_not() -> str | None:
    """Why the compiled kernels are not used on this machine; None if they are."""
    _functions()
    return _problem


_problem: str | None = None


@cache
def _functions() -> dict[str, Any] | None:
    global _problem
    try:
        _show_openmp()
        library = ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        _problem = first_line(error)
        return None
    found = {}
    for name, arguments in {**_SIGNATURES, **_TRAIN_SIGNATURES}.items():
        for suffix in _SUFFIXES.values() if name in _SIGNATURES else ("f32",):
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, _INT if name == "can_multiply" else None
            found[f"{name}_{suffix}"] = function
    return found


def _library() -> Path:
    if os.environ.get("POSTTRAIN_COMPILE") == "0":
        raise LookupError("POSTTRAIN_COMPILE=0")
    if not sys.platform.startswith("linux"):
        raise LookupError(f"compiled kernels are for Linux, this is {sys.platform}")
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise LookupError("no C++ compiler found (CXX, c++, g++, clang++)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    key = hashlib.sha256("\0".join([*texts, *FLAGS, version, _processor()]).encode()).hexdigest()[:20]
    target = cache_folder() / "kernels" / f"cpu-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(target.parent):
            if not target.exists():
                print("Compiling the CPU kernels (once, up to half a minute) ...", file=sys.stderr, flush=True)
                _compile(compiler, target)
    return target


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    # Of workers that start together one compiles. If the folder cannot be locked, or the compiling process never ends
    # (stopped by Ctrl-Z, say), each compiles for itself, which is safe: the result is put in place by one rename.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _wait_for_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int) -> None:
    began, reported = time.monotonic(), False
    while (waited := time.monotonic() - began) < WAIT_S:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if waited > TELL_S and not reported:
                reported = True
                print("Waiting for another process that compiles the CPU kernels ...", file=sys.stderr, flush=True)
            time.sleep(0.05)
        except OSError:
            return


def _processor() -> str:
    # `-march=native` depends on the instruction sets. They are part of the key, so that machines may share a home.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, target: Path) -> None:
    # Linked without OpenMP on purpose: the symbols are then those of the OpenMP that torch has loaded, so that both
    # share one set of threads.
    wide = ["-mprefer-vector-width=512"] if "avx512f" in _processor() else []
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        linked, objects = Path(folder) / "cpu.so", [str(Path(folder) / f"{name}.o") for name in SOURCES]
        steps = [
            [compiler, *FLAGS, "-march=native", *wide, "-c", str(FOLDER / name), "-o", made]
            for name, made in zip(SOURCES, objects, strict=True)
        ]
        _run(steps)
        _run([[compiler, "-shared", *objects, "-o", str(linked)]])
        ctypes.CDLL(str(linked))  # do not keep a library that cannot be loaded here
        os.replace(linked, target)


def _show_openmp() -> None:
    # Make torch's OpenMP visible to libraries loaded later. torch's builds for ARM load it for themselves alone, and
    # the compiled library would not load.
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return


def _run(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        words = process.communicate()[1]
        if process.returncode:
            name = Path(str(process.args[0])).name  # pyright: ignore
            raise LookupError(f"{name} failed: {(words or 'no message').strip()}")
