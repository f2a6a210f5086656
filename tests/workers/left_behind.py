"""A run on several processes that kills a rank and then itself; what runs leave: processes, shared memory, files."""

from __future__ import annotations

import os
import time
from pathlib import Path

WAIT_S = 60.0  # about one second where nothing else runs
KILLED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from posttrain import cores
    cores.usable = lambda: 2  # one thread each, as those that it is compared with
    import posttrain
    from light_rewards import even_share
    from posttrain.controller.ray_cluster import RayCluster
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    start, update = RayCluster.start, RayPPOTrainer._update

    def told(self):
        start(self)
        print("Ray's folder:", self.folder, flush=True)

    def killed(self, batch, step):
        if step == 2 and not self.run.restarts:
            os.kill(self.workers.watch.ranks[1].identity.process.pid, signal.SIGKILL)
        if step == 5:
            print("Snapshots:", self.run.snapshots, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, batch, step)

    RayCluster.start, RayPPOTrainer._update = told, killed
    posttrain.train({settings!r}, reward=even_share)
"""

REPLACED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from posttrain import cores
    cores.usable = lambda: 3  # one thread each, as those that it is compared with
    import posttrain
    from light_rewards import even_share
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    generate, update = RayPPOTrainer._generate, RayPPOTrainer._update

    def send(trainer, signal):
        os.kill(trainer.workers.watch.ranks[-1].identity.process.pid, signal)

    def generating(self, batch):
        if self.step == 1:
            send(self, signal.SIGKILL)
        return generate(self, batch)

    def updating(self, batch, step):
        if step == 3:
            send(self, signal.SIGSTOP)
        return update(self, batch, step)

    trained = []
    def initialised(self):
        init(self)
        trained.append(self.workers.watch.ranks[0].identity.process.pid)

    init = RayPPOTrainer.init_workers
    RayPPOTrainer._generate, RayPPOTrainer._update = generating, updating
    RayPPOTrainer.init_workers = initialised
    result = posttrain.train({settings!r}, reward=even_share)
    print("Result:", result.restarts, result.replaced, len(trained), flush=True)
"""

LOST = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from posttrain import cores
    cores.usable = lambda: 3  # one thread each, as those that it is compared with
    import posttrain
    from light_rewards import even_share
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    score, update = RayPPOTrainer._score, RayPPOTrainer._update

    def kill(trainer, name):
        (lost,) = [rank for rank in trainer.workers.watch.ranks if rank.name == name]
        os.kill(lost.identity.process.pid, signal.SIGKILL)

    def scoring(self, batch):
        if self.step == 1:
            kill(self, "reward_model 0")
        return score(self, batch)

    def updating(self, batch, step):
        if step == 3 and not self.run.restarts:
            kill(self, "critic 0")
        return update(self, batch, step)

    RayPPOTrainer._score, RayPPOTrainer._update = scoring, updating
    result = posttrain.train({settings!r}, reward=even_share)
    print("Result:", result.restarts, result.replaced, flush=True)
"""

REFERENCE_LOST = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from posttrain import cores
    cores.usable = lambda: 3  # one thread each, as those that it is compared with
    import posttrain
    from light_rewards import even_share
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    init, begin, update = RayPPOTrainer.init_workers, RayPPOTrainer._begin_beside, RayPPOTrainer._update
    trained = set()

    def kill(trainer, number):
        ranks = {{rank.name: rank.identity.process.pid for rank in trainer.workers.watch.ranks}}
        trained.add(ranks["rank 0"])
        os.kill(ranks[f"reference {{number}}"], signal.SIGKILL)

    def beginning(self, batch):
        begun = begin(self, batch)
        if self.step == 1:
            kill(self, {last})  # at work, or about to begin
        return begun

    def updating(self, batch, step):
        if step == 3:
            kill(self, 0)  # it has answered; the update reads what it made
        return update(self, batch, step)

    RayPPOTrainer._begin_beside, RayPPOTrainer._update = beginning, updating
    result = posttrain.train({settings!r}, reward=even_share)
    print("Result:", result.restarts, result.replaced, len(trained), flush=True)
"""


def processes_of(folder: str) -> list[int]:
    """Processes that were started with this folder, or have a file open in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            files = [os.readlink(fd) for fd in (entry / "fd").iterdir()]
            if folder.encode() in (entry / "cmdline").read_bytes() or any(f.startswith(folder + "/") for f in files):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def check_nothing_is_left(folder: str, shared: set[str]) -> None:
    until = time.monotonic() + WAIT_S
    while (Path(folder).exists() or processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(folder).exists() and not processes_of(folder)
    # Folders of snapshots come and go with other runs of this machine; this run's own is one of those that are checked.
    left = {name for name in os.listdir("/dev/shm") if not name.startswith("posttrain-")} - shared
    while left & set(os.listdir("/dev/shm")) and time.monotonic() < until:  # other programs' go by themselves
        time.sleep(0.1)
    assert not left & set(os.listdir("/dev/shm"))
