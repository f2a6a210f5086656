"""`posttrain replay RUN STEP [--print PATTERN] [--hook FILE]`.

From a checkpoint (or the first weights) the recorded batches are applied again, up to one step's update. On the same
device with the same number of threads losses are bitwise identical. Tensors can be watched on the way: fields of the
batch, outputs of modules, weights after the update. torch is imported once it is known that the step can be replayed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.algorithms import get_adv_estimator
from posttrain.checkpoint.folders import steps_in
from posttrain.config import load_config
from posttrain.config.trainer import rollout_workers_of
from posttrain.errors import UserError
from posttrain.external import import_external
from posttrain.spelling import OptionParser
from posttrain.tracking.loggers import read_metrics
from posttrain.tracking.progress import waiting
from posttrain.tracking.rundir import batch_folder, find_run, kept_steps, read_facts

if TYPE_CHECKING:
    import torch

    from posttrain.protocol import DataProto
    from posttrain.workers.groups import ColocatedGroup, CriticGroup, PolicyGroup

# (name, tensor): `batch/advantages`, `actor/model.layers.0.mlp` (an output), `after/actor/model.norm.weight`.
Watch = Callable[[str, "torch.Tensor"], object]
COMPARED = ("policy_loss", "actor/loss", "actor/grad_norm", "kl_loss", "critic/vf_loss", "critic/grad_norm")


def main(args: Sequence[str]) -> int:
    """0 if the losses are bitwise identical to the recorded ones, 1 if not."""
    parser = OptionParser(
        prog="posttrain replay", description="Make a past step's update again from its recorded batch."
    )
    parser.add_argument("run", help="the run's folder, or its name below outputs/")
    parser.add_argument("step", type=int, nargs="?", help="the step; without it, those that can be replayed are named")
    parser.add_argument("--print", metavar="PATTERN", dest="pattern", help="show tensors by name, e.g. batch/")
    parser.add_argument("--hook", metavar="FILE", help="a Python file with `watch(name, tensor)`")
    options = parser.parse_args(args)
    run = find_run(options.run)
    if options.step is None:
        found = replayable(run)
        for step, start in found.items():
            print(f"step {step}: from {f'the checkpoint of step {start}' if start else 'the first weights'}")
        if not found:
            print(f"No step of {run} can be replayed: tracking.keep_batches keeps the batches that it takes.")
        return 0 if found else 1
    start = find_start(run, options.step)
    watch, same = _watch(options), True
    for made in replay(run, start, options.step, watch):
        losses = ", ".join(f"{name} {made.metrics[name]!r}" for name in COMPARED if name in made.metrics)
        differing = "; ".join(f"{name} was {a!r}, is {b!r}" for name, (a, b) in made.differing.items())
        print(f"step {made.step}: {losses}; " + (differing or "the recorded values, bit for bit"))
        same = same and not made.differing
    return 0 if same else 1


def _watch(options: argparse.Namespace) -> Watch | None:
    if options.hook:
        return _from_file(Path(options.hook))
    if options.pattern is None:
        return None
    wanted = re.compile(options.pattern)
    return lambda name, tensor: print(_words(name, tensor)) if wanted.search(name) else None


def _from_file(path: Path) -> Watch:
    if path.suffix != ".py":
        raise UserError(f"--hook {path}: give a Python file that defines watch(name, tensor)")
    watch = getattr(import_external(str(path), "--hook"), "watch", None)
    if not callable(watch):
        raise UserError(f"--hook {path}: the file defines no function watch(name, tensor)")
    return watch


def _words(name: str, tensor: torch.Tensor) -> str:
    values = tensor.double()
    numbers = "empty"
    if values.numel():
        numbers = f"mean {values.mean():.6g}, least {values.min():.6g}, most {values.max():.6g}"
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}: {numbers}"


class ReplayError(UserError):
    """The step cannot be replayed; the text says which ones can."""


def replayable(run: Path) -> dict[int, int]:
    """Step -> the checkpoint's step from which it can be replayed; 0 stands for the first weights."""
    kept, starts = kept_steps(run / "batches"), [0, *steps_in(run / "checkpoints")]
    found = {}
    for step in kept:
        start = max(start for start in starts if start < step)
        if set(range(start + 1, step + 1)) <= set(kept):
            found[step] = start
    return found


def find_start(run: Path, step: int) -> int:
    """The step of the checkpoint from which a step can be replayed (0: the first weights), or a ReplayError."""
    possible = replayable(run)
    if read_facts(run / "batches") is None or step not in possible:
        raise ReplayError(_why_not(run, step, possible))
    return possible[step]


def _why_not(run: Path, step: int, possible: dict[int, int]) -> str:
    if not kept_steps(run / "batches"):
        return f"{run} kept no batches: with tracking.keep_batches=-1 a run keeps those of all steps (N: the last N)."
    can = f"These can: {_ranges(sorted(possible))}." if possible else "None can."
    return (
        f"Step {step} of {run} cannot be replayed: the batches of all steps from a checkpoint up to it must be there. "
        f"{can} trainer.save_freq makes checkpoints, tracking.keep_batches keeps batches."
    )


def _ranges(steps: list[int]) -> str:
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


@dataclass
class Replayed:
    """One replayed update."""

    step: int
    metrics: dict[str, float]
    recorded: dict[str, float]

    @property
    def differing(self) -> dict[str, tuple[float, float]]:
        """Name -> (recorded, now) of the losses and norms that are not bitwise identical."""
        names = [name for name in COMPARED if name in self.metrics and name in self.recorded]
        pairs = {name: (self.recorded[name], self.metrics[name]) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def replay(run: Path, start: int, step: int, watch: Watch | None = None) -> Iterator[Replayed]:
    """The updates from the checkpoint of step `start` (0: the first weights) up to `step`; only the last is watched."""
    facts = read_facts(run / "batches")
    assert facts is not None
    with ExitStack() as stack:
        actor, critic = _workers(stack, run, facts, start)
        from posttrain.protocol import DataProto  # which needs torch, as the workers did

        recorded = {int(line["step"]): line for line in read_metrics(run / "metrics.jsonl")}
        for number in range(start + 1, step + 1):
            batch = DataProto.load_from_disk(batch_folder(run / "batches", number))
            watching = watch if number == step else None
            groups = {"actor": actor} | ({"critic": critic} if critic else {})
            # In the order of the loop: the critic learns first.
            with _watch_update(groups, batch, watching):
                metrics = dict(critic.update_critic(batch)) if critic else {}
                # As in the run: during warm-up the actor is not updated.
                if number > facts["critic_warmup"]:
                    metrics |= actor.update_actor(batch)
            yield Replayed(number, metrics, recorded.get(number, {}))


def _workers(
    stack: ExitStack, run: Path, facts: dict[str, Any], start: int
) -> tuple[ColocatedGroup | PolicyGroup, CriticGroup | None]:
    """Actor and critic as the run had them after step `start`."""
    with waiting():
        from posttrain.checkpoint.manager import CheckpointManager, restore_rng
        from posttrain.models.loading import load_tokenizer
        from posttrain.trainer.run.process import open_workers, prepare_torch
        from posttrain.workers.fsdp_workers import ActorRefWorker, ActorRolloutRefWorker, CriticWorker
        from posttrain.workers.groups import ColocatedGroup, CriticGroup, PolicyGroup
        from posttrain.workers.roles import pick_device

    config = load_config(facts["config"]).config
    # Recorded batches are complete: they need neither rollout, nor reference, nor reward model. Only an engine in the
    # trainer's own process is built again, because it may have fused the weights, and fused products round differently.
    rollout = config.actor_rollout_ref.rollout
    apart = rollout_workers_of(config) > 0 or rollout.name == "server"
    policy, group = (ActorRefWorker, PolicyGroup) if apart else (ActorRolloutRefWorker, ColocatedGroup)
    rollout.n_workers = config.actor_rollout_ref.ref.n_workers = 0
    config.reward_model.n_workers = 0
    device = pick_device(config.trainer.device)
    prepare_torch(config.trainer, device)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    workers = stack.enter_context(open_workers(config, device, config.actor_rollout_ref.model.external_lib))
    made = workers.create("actor", policy, config, tokenizer, device, total_updates=facts["updates"])
    actor = group(made)
    actor.init_model()
    critic = None
    if get_adv_estimator(config.algorithm.adv_estimator).needs_critic:
        updates, tokens = facts["critic_updates"], min(len(tokenizer), actor.vocabulary())
        made = workers.create("critic", CriticWorker, config, device, total_updates=updates, tokens=tokens)
        critic = CriticGroup(made)
        critic.init_model()
    if start:
        manager = CheckpointManager(run / "checkpoints", keep=None, on_note=lambda text: None)
        path = manager.path_of(start)
        actor.load(manager.role_folder(path, "actor"))
        if critic:
            critic.load(manager.role_folder(path, "critic"))
        # The run's update began with the generators in this state.
        restore_rng(manager.load_rng(path))
    return actor, critic


@contextmanager
def _watch_update(groups: dict[str, Any], batch: DataProto, watch: Watch | None) -> Iterator[None]:
    """Inside, `watch` sees the batch's tensors and every module's output; afterwards the weights."""
    if watch is None:
        yield
        return
    for name, tensor in batch.batch.items():
        watch(f"batch/{name}", tensor)
    modules = {role: module for role, group in groups.items() if (module := _module(group)) is not None}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=f"{role}/{name}", to=watch: _show(to, name, out))
        for role, module in modules.items()
        for name, part in module.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for role, module in modules.items():
        for name, weight in module.named_parameters():
            watch(f"after/{role}/{name}", weight.detach())


def _module(group: Any) -> torch.nn.Module | None:
    """The trained module where it lives in this process."""
    worker = getattr(group, "worker", None)
    return getattr(getattr(worker, "engine", None), "module", None)


def _show(watch: Watch, name: str, out: Any) -> None:
    import torch

    first = out[0] if isinstance(out, tuple | list) and out else out
    if isinstance(first, torch.Tensor):
        watch(name, first.detach())
