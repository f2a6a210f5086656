"""One rank of a self-test: `python -m posttrain.commands.selftest.rank ...`, started by the command.

It writes what each check found into a file of its own, so that the command sees which rank stopped answering.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.commands.selftest.checks import CHECKS
from posttrain.commands.selftest.world import World, Wrong
from posttrain.engine.ranks import join_ranks, leave_ranks
from posttrain.errors import UserError

FAILED = 3
"""Exit status: a check failed here, and the others of the group cannot go on with this rank."""


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--ranks", "--gpus"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("checks", nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    shared = options.gpus and options.ranks > options.gpus
    device = torch.device("cuda", options.rank % options.gpus) if options.gpus else torch.device("cpu")
    torch.set_num_threads(1 if not options.gpus else torch.get_num_threads())
    # NCCL rejects two ranks on one GPU; gloo moves their tensors through host memory.
    backend = "gloo" if shared or not options.gpus else None
    join_ranks(options.rank, options.ranks, options.address, device, timeout_s=options.timeout, backend=backend)
    world = World(options.rank, options.ranks, device, options.folder)
    for name in options.checks:
        written = options.folder / "found" / f"{name} {options.rank}.json"
        begun, world.facts = time.monotonic(), []
        _write(written.with_suffix(".begun"), {})
        try:
            CHECKS[name].run(world)
            if options.ranks > 1:
                dist.barrier()
            error = None
        except (Wrong, UserError) as found:
            error = {"text": str(found), "own": True}
        except Exception as found:
            traceback.print_exc()
            error = {"text": f"{type(found).__name__}: {found}".strip()[:500], "own": False}
        _write(written, {"error": error, "facts": world.facts, "seconds": time.monotonic() - begun})
        if error is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(FAILED)  # not through `leave_ranks`, which would wait for ranks that wait for this one
    leave_ranks()
    return 0


def _write(file: Path, content: dict[str, object]) -> None:
    partial = file.with_suffix(f".partial{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(file)  # the command may read it at any moment


if __name__ == "__main__":
    sys.exit(main())
