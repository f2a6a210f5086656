"""Programs that are killed or signalled, each in a fork of one process that has imported everything: it saves seconds.

A fork goes on where the import ended, as a fresh interpreter would; it has no thread, lock or generator of a test's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

SERVER = """
import json, os, sys
import posttrain, posttrain.cli
import posttrain.models.fused_layer, posttrain.trainer.generation.command, posttrain.trainer.ppo.runner
import posttrain.trainer.supervised.runner, transformers.models.qwen2.modeling_qwen2
for line in sys.stdin:
    job, pid = json.loads(line), os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    os._exit(0)
for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
    os.dup2(os.open(name, flags), number)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["folder"])
exec(compile(job["code"], "<forked>", "exec"), {"__name__": "__main__"})
"""


class Forked:
    """`run(code)` is `subprocess.run([sys.executable, "-c", code])` with what it printed."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # no thread may run when it forks
        command = [sys.executable, "-c", SERVER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen(command, env=environment, **pipes)  # pyright: ignore

    def run(self, code: str) -> CompletedProcess[str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = (Path(folder, name) for name in ("out", "err"))
            out.touch()
            err.touch()
            job = {"code": code, "out": str(out), "err": str(err), "folder": os.getcwd()}
            self.server.stdin.write(json.dumps(job | {"environment": dict(os.environ)}) + "\n")
            self.server.stdin.flush()
            status = int(self.server.stdout.readline())
            return CompletedProcess(["forked"], status, out.read_text(), err.read_text())

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
