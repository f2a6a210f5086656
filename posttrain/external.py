"""Imports a user's module or file, such as one that registers an estimator; its errors name file and line.

Other Python interpreters: packages that do not fit together with the trainer's run in one of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

from posttrain.errors import UserError

KEY = "actor_rollout_ref.model.external_lib"
# File -> (time of its last change, size, module): configuration and trainer import the same file.
_loaded: dict[Path, tuple[int, int, ModuleType]] = {}


def import_external(name: str, key: str = KEY) -> ModuleType:
    """The imported module; a path ending in `.py` is loaded as a file, anything else from the working folder first."""
    try:
        if name.endswith(".py"):
            return _import_file(Path(name).expanduser(), key)
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        frame = _frame_of(error)
        raise UserError(
            f"{key}={name}: importing it failed in {frame.filename}, line {frame.lineno}: "
            f"{type(error).__name__}: {error}{_hint(error)}"
        ) from error


def _frame_of(error: Exception) -> traceback.FrameSummary:
    """Where an import failed: the last line of a user's file, not that of a library which it called."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(os.__file__).parent), str(Path(__file__).parent), "<frozen")
    return next((one for one in reversed(frames) if not one.filename.startswith(libraries)), frames[-1])


def is_external(module: str) -> bool:
    """Whether a module of this name is a file that `import_external` has loaded."""
    return any(loaded.__name__ == module for _, _, loaded in _loaded.values())


def _hint(error: Exception) -> str:
    """What to do about a file that was written for verl."""
    absent = isinstance(error, ModuleNotFoundError) and error.name == "verl"
    return ". Write `posttrain` for `verl` in it, or install the package of that name (compat/README.md)" * absent


def _import_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{key}={path}: no such file")
    state = os.stat(path)
    changed, size, module = _loaded.get(path.resolve(), (0, 0, None))
    if module is not None and (changed, size) == (state.st_mtime_ns, state.st_size):
        return module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)  # or else an import by its name would find the incomplete module
        raise
    _loaded[path.resolve()] = (state.st_mtime_ns, state.st_size, module)
    return module


def find_missing(python: str | None, package: str) -> str | None:
    """Why a package cannot be used in an interpreter (None: this one); None if it can."""
    python = python or sys.executable
    if shutil.which(python) is None:
        return f"there is no interpreter {python}"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    if subprocess.run([python, "-c", look, package]).returncode:
        return f"{python} does not have the package {package}"
    return None
