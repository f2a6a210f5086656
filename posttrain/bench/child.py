"""A system in its own process, started with a job and asked one thing at a time; a training run in its own process; and
the load of other processes, by which a reader can judge the figures."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.systems import System, own_code_variables


class ChildFailed(Exception):
    """The process could not do it; the text is one line for the table."""


def end_with_parent() -> None:
    """In a new process: let the kernel kill it when the bench ends, however that happens."""
    # A paused process could not end by itself. Linux only; elsewhere `Child.close` must be reached.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def log_file(name: str) -> Path:
    """Where the output of a process is kept."""
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{name}.log"


# Settings of every run that is measured: the embedded task, and nothing written but metrics.
OF_EVERY_RUN = (
    "preset=embedded",
    "trainer.export_hf=none",
    "trainer.project_name=bench",
    "trainer.experiment_name=run",
    "tracking.samples_freq=0",
    "reward.num_workers=1",
)


class TrainingProcess:
    """A run of our own code, `bench/run` below `folder`; what it prints goes to `log`."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path, **variables: str) -> None:
        self.log, self.metrics = log, folder / "bench" / "run" / "metrics.jsonl"
        given = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **variables, **own_code_variables()}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=given,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=end_with_parent,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def problem(self) -> str | None:
        """Why an ended run failed: its status and the last line that it printed."""
        if not self.process.returncode:
            return None
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"status {self.process.returncode}: {lines[-1] if lines else 'no message'} (see {self.log})"

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of the steps so far."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.metrics.read_text().splitlines() if line.endswith("}")]
        return []

    def end(self, number: int = signal.SIGKILL) -> None:
        """End what is left of it, reward workers and Ray's processes included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait()


class Child:
    """Talks to one runner (`peers/wire.py`); `show(seconds)` is called every second while it works."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as words:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env=dict(variables),
                text=True,
                start_new_session=True,  # Ctrl-C is ours to handle: children are closed in order
                preexec_fn=end_with_parent,
            )

    def ready(self, show: Callable[[float], None], deadline: float) -> dict[str, Any]:
        """Wait until the system is loaded; gives its settings and the packages it runs on."""
        return self._answer(show, deadline)["ready"]

    def ask(self, request: Mapping[str, Any], show: Callable[[float], None], deadline: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(f"ended before it was asked; see {self.log}") from None
        return self._answer(show, deadline)

    def _answer(self, show: Callable[[float], None], deadline: float) -> dict[str, Any]:
        out, started = self.process.stdout, time.monotonic()
        assert out is not None
        # Waits with select and not in readline, so that the status line counts the seconds and the deadline holds.
        while not select.select([out], [], [], 1.0)[0]:
            waited = time.monotonic() - started
            if waited > deadline:
                raise ChildFailed(f"no answer within {deadline:.0f} s; see {self.log}")
            show(waited)
        line = out.readline()
        if not line:
            status = self.process.wait()
            raise ChildFailed(f"ended with status {status}; see {self.log}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer

    def pause(self) -> None:
        """Stop it and its processes: threads that spin for a while after their work would slow the next system."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Let it end by itself, or kill it, with all processes that it left behind in its group."""
        # A paused process would not notice that its input is closed.
        assert self.process.stdin is not None and self.process.stdout is not None
        self.resume()
        try:
            # The runner's loop ends with its input: engines get to free their devices.
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._signal(signal.SIGKILL)
        self.process.stdout.close()


@contextmanager
def start_runner(
    system: System, module: str, job: Mapping[str, Any], name: str, *, threads: int, kind: str = "cpu"
) -> Iterator[Child]:
    """The system's runner with this job, its output in logs/NAME.log; it is closed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        child = Child(system.command(path, module, kind), system.variables_for(threads, kind), log_file(name))
        try:
            yield child
        finally:
            child.close()


class OtherLoad:
    """`share()` is the part of all cores that processes outside this session have used since its creation."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.busy, self.total, self.mine = (*_ticks(), _ticks_of(session))

    def share(self) -> float | None:
        """None without /proc."""
        busy, total = _ticks()
        if total <= self.total:
            return None
        # The session that it was started in identifies its own processes.
        mine = _ticks_of(self.session) - self.mine
        return round(max(0.0, (busy - self.busy - mine) / (total - self.total)), 3)


def _ticks() -> tuple[int, int]:
    # (busy, all) since the machine started.
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # all but idle and waiting for disks


def _ticks_of(session: int) -> int:
    used = 0
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            # The program's name is in parentheses and may hold some itself: split after the last one.
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            used += sum(map(int, fields[11:15]))  # user and system time, its own and of children that it waited for
    return used
