"""How every run begins and ends: its directory, external module and device, and errors turned into advice."""

from __future__ import annotations

import copy
import os
import random
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.checkpoint.errors import disk_words
from posttrain.config.resolved import Resolved
from posttrain.config.trainer import RunConfig
from posttrain.errors import UserError
from posttrain.external import KEY, import_external
from posttrain.kernels.onednn import fix_product_library
from posttrain.tracking.console import ignore_hangup
from posttrain.tracking.progress import say
from posttrain.tracking.rundir import RunDirectory
from posttrain.tracking.tee import tee_output
from posttrain.trainer.run.directory import open_run_directory
from posttrain.trainer.run.memory import explain_out_of_memory, is_out_of_memory

_DETERMINISTIC: Any = torch.utils.deterministic  # its attribute exists at run time only


@contextmanager
def opened_run(resolved: Resolved, stem: str | None = None) -> Iterator[tuple[ExitStack, Any, RunDirectory]]:
    """(stack, settings, opened directory) of a run, with a log of its output and errors turned into advice.

    The stack closes what the run opens before the directory. `stem` begins the names of runs that have none of their
    own.
    """
    config = copy.deepcopy(resolved.config)  # sizes and paths are filled in later; the caller's stays as it was
    with ExitStack() as stack:
        stack.enter_context(ignore_hangup())
        stack.enter_context(restore_determinism())
        run, _ = open_run_directory(config, say, stem=stem)
        stack.callback(run.close)
        stack.enter_context(tee_output(run.log))
        say(f"Run directory: {run.path}")
        for note in resolved.notes:
            say(f"note: {note}")
        # Innermost: an error is explained before workers are shut down, which may take a while or fail, too.
        with explain_errors(run, config):
            yield stack, config, run


def load_external(name: str | None, setting: str = KEY) -> None:
    """Import the user's module, which may register estimators, losses, samplers or engines."""
    if name:
        import_external(name, setting)
        say(f"Loaded {name}.")


def prepare_torch(settings: RunConfig, device: torch.device) -> None:
    """Seed and determinism as the section `trainer` says, and the device in words."""
    seed_and_determinism(settings, device)
    threads = torch.get_num_threads()
    what = torch.cuda.get_device_name() if device.type == "cuda" else f"{threads} thread{'s' * (threads != 1)}"
    say(f"Device: {device} ({what})")


def seed_and_determinism(settings: RunConfig, device: torch.device) -> None:
    """In every process that computes."""
    seed_all(settings.seed)
    if device.type == "cpu":
        fix_product_library()
    if settings.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Or every new tensor would be filled with NaN first: nothing here reads what it has not written.
        _DETERMINISTIC.fill_uninitialized_memory = False


@contextmanager
def restore_determinism() -> Iterator[None]:
    """Around a run: what `prepare_torch` switches on holds for this run, not for what its process does next."""
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = _DETERMINISTIC.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        _DETERMINISTIC.fill_uninitialized_memory = filled


def seed_all(seed: int) -> None:
    """The global generators that ours or a user's code may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def explain_errors(run: RunDirectory, config: Any) -> Iterator[None]:
    """Memory and disk errors say what to do; any other leaves its traceback in the run directory."""
    try:
        yield
    except UserError:
        raise  # its text says it all
    except Exception as error:
        words = _words(error, run, config)
        if words is None:
            _write_crash(run)
            raise
        raise UserError(words) from error


def _words(error: Exception, run: RunDirectory, config: Any) -> str | None:
    if is_out_of_memory(error):
        return explain_out_of_memory(config, error)
    return disk_words(error, run.path) if isinstance(error, OSError) else None


def _write_crash(run: RunDirectory) -> None:
    path = run.crash / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        path.write_text(traceback.format_exc())
    except OSError:
        return  # the original error matters more than its copy
    say(f"The run failed; the traceback is in {Path(path)}. The same command continues from the newest checkpoint.")
