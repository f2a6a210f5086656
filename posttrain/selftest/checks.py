"""The checks that all ranks run together, in order. Each raises `CheckFailed` with a sentence that names the fault.

`python -m posttrain.selftest.checks ...` is one rank, started by the command. It writes what each check found into a
file of its own, so that the command sees which rank stopped answering.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from posttrain.checkpoint import CheckpointManager, capture_rng, restore_rng
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.engine.base import EngineLayout, TrainEngine
from posttrain.engine.megatron import settings
from posttrain.engine.ranks import join_ranks, leave_ranks, team_of
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.forward import row_log_probs
from posttrain.models.lora import add_adapters
from posttrain.models.proof import beyond_rounding
from posttrain.rollout.base import RolloutEngine, Sampling
from posttrain.rollout.engine_kwargs import OUTSIDE
from posttrain.rollout.engines import build_engine, can_take_adapters
from posttrain.rollout.generate import generate
from posttrain.rollout.weight_buckets import SyncError, checksum_of_all, split_into_buckets
from posttrain.selftest.world import (
    ALLOWED,
    CheckFailed,
    World,
    compare_with_one_device,
    one_device,
    relative,
    train,
)
from posttrain.workers.policy import WeightProbe

LONGEST = 64
PROMPTS = [[72, 101, 108], [49, 32, 43, 32, 50, 32, 61], [49, 32, 43, 32, 50, 32, 61], [120]]
ADAPTERS = ModelConfig(lora_rank=4, lora_alpha=8)


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    run: Callable[[World], None]
    needs: Callable[[int], str | None]
    """Why it cannot run on so many ranks; None where it can."""


CHECKS: dict[str, Check] = {}


def check(name: str, about: str, needs: Callable[[int], str | None] = lambda ranks: None) -> Any:
    def add(work: Callable[[World], None]) -> Callable[[World], None]:
        CHECKS[name] = Check(name, about, work, needs)
        return work

    return add


def several(ranks: int) -> str | None:
    return "it takes two ranks or more" if ranks < 2 else None


def even(ranks: int) -> str | None:
    return f"it takes an even number of ranks, and there are {ranks}" if ranks % 2 else several(ranks)


@check("collectives", "ranks add up, gather and send what they should", several)
def collectives(world: World) -> None:
    size, own = world.size, torch.arange(1.0, 1025.0, device=world.device) * (world.rank + 1)
    total = own.clone()
    dist.all_reduce(total)
    expected = torch.arange(1.0, 1025.0, device=world.device) * (size * (size + 1) / 2)
    if not torch.equal(total, expected):
        raise CheckFailed(
            f"all_reduce: rank {world.rank} has {float(total[0]):g} as the sum of 1 to {size}, not "
            f"{float(expected[0]):g}: a sum over ranks is wrong"
        )
    for place, part in enumerate(world.gathered(own)):
        if not torch.equal(part, own / (world.rank + 1) * (place + 1)):
            raise CheckFailed(f"all_gather: what rank {place} gave arrives elsewhere: the order of ranks is wrong")
    for source in range(size):
        sent = torch.full((8,), float(world.rank), device=world.device)
        dist.broadcast(sent, source)
        if not bool((sent == source).all()):
            raise CheckFailed(f"broadcast: from rank {source} comes {float(sent[0]):g}")
    share = torch.empty(1024 // size, device=world.device)
    dist.reduce_scatter_tensor(share, own[: 1024 // size * size].contiguous())
    if not torch.equal(share, expected[world.rank * len(share) :][: len(share)]):
        raise CheckFailed(f"reduce_scatter: rank {world.rank} has another share of the sum than its own")
    world.facts.append(f"{dist.get_backend()} over {size} ranks")


@check("devices", "every device computes what a CPU does, and all devices the same")
def devices(world: World) -> None:
    here = torch.cat(row_log_probs(world.module().eval(), PROMPTS[:3])).detach().cpu()
    host = torch.cat(row_log_probs(world.module(torch.device("cpu")).eval(), PROMPTS[:3])).detach()
    if (apart := relative(here, host)) > ALLOWED:
        raise CheckFailed(f"the device of rank {world.rank} computes log-probs that are {apart:.1e} from a CPU's")
    parts = world.gathered(here)
    for rank, part in enumerate(parts):
        if not torch.equal(part, parts[0]):
            raise CheckFailed(f"rank {rank} computes other numbers than rank 0 from the same weights")
    world.facts.append(f"log-probs within {relative(here, host):.1e} of a CPU")


@check("fsdp2", "training sharded over all ranks equals training on one device", several)
def fsdp2(world: World) -> None:
    _compare(world, EngineLayout())


@check(
    "hsdp",
    "two copies of a sharded model equal one device",
    lambda ranks: even(ranks) or ("it takes four ranks" if ranks < 4 else None),
)
def hsdp(world: World) -> None:
    _compare(world, EngineLayout(fsdp_size=world.size // 2))


@check("sequence", "sequences cut over two ranks (Ulysses) equal one device", even)
def sequence(world: World) -> None:
    _compare(world, EngineLayout(sequence_size=2))


@check("lora", "LoRA adapters trained over all ranks equal one device", several)
def lora(world: World) -> None:
    expected = one_device(world, _adapted(world))
    compare_with_one_device(world, train(world.engine(_adapted(world), EngineLayout()), world), expected)


def _has_megatron(ranks: int) -> str | None:
    if not settings.is_installed():
        return 'megatron-core is not installed (pip install "posttrain[megatron]")'
    return even(ranks)


@check("megatron", "Megatron with two tensor ranks equals one device", _has_megatron)
def megatron(world: World) -> None:
    from posttrain.engine.megatron.groups import leave_groups

    try:
        _compare(world, EngineLayout("megatron", own={"tensor_parallel_size": 2}))
    finally:
        leave_groups()


def _compare(world: World, layout: EngineLayout) -> None:
    expected = one_device(world)
    compare_with_one_device(world, train(world.engine(world.module(), layout), world), expected)


def _adapted(world: World, device: torch.device | None = None) -> torch.nn.Module:
    torch.manual_seed(3)  # adapters are drawn: alike on all ranks
    module = add_adapters(world.module(torch.device("cpu")), ADAPTERS)
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return module.to(device or world.device)


# -- resume -------------------------------------------------------------------------------------------------------
@check("resume", "a checkpoint of all ranks is continued bit-for-bit")
def resume(world: World) -> None:
    layout = EngineLayout() if world.size > 1 else None
    engine = world.engine(world.module(), layout)
    train(engine, world, steps=1)
    saved = _state(engine)
    torch.manual_seed(7)  # a checkpoint holds the random numbers of the driver: here those of rank 0
    manager = CheckpointManager(world.folder / "checkpoints")
    path = _save(world, engine, manager)
    drawn = torch.rand(4)
    again = world.engine(world.module(), layout)
    again.load(manager.role_folder(path, "actor"))
    for name, tensor in _state(again).items():
        if not torch.equal(tensor, saved[name]):
            what = "the state of the optimizer" if name.startswith("optim") else "a weight"
            raise CheckFailed(f"{what} is not what was saved: {name} differs on rank {world.rank}")
    whole, continued = train(engine, world, first=1), train(again, world, first=1)
    for name, weight in whole.weights.items():
        if not torch.equal(weight, continued.weights[name]):
            raise CheckFailed(
                f"a step after the checkpoint is not bitwise that of the uninterrupted run: {name} differs"
            )
    restore_rng(manager.load_rng(path))
    if not torch.equal(torch.rand(4), drawn):
        raise CheckFailed(
            "random numbers after a resume are not those that would have followed: their state is not restored"
        )
    world.facts.append("weights, optimizer, random numbers and the next step are bitwise identical")


def _save(world: World, engine: TrainEngine, manager: CheckpointManager) -> Path:
    """All ranks write their parts of the weights; the first adds the rest and completes the checkpoint."""
    parts = world.folder / "parts"
    engine.save(parts)
    if world.size > 1:
        dist.barrier()
    if world.rank == 0:
        manager.save(1, tensors={"actor": parts.rename}, state={}, rng=capture_rng())
    if world.size > 1:
        dist.barrier()
    return manager.folder / "global_step_1"


def _state(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's part of all that an exact continuation needs, read from the optimizer itself."""
    found = {}
    for name, master in zip(engine.optimizer.names, engine.optimizer.masters, strict=True):
        found |= {f"model.{name}": master} | {
            f"optim.{key}.{name}": value for key, value in engine.optimizer.adam.state[master].items()
        }
    return {name: getattr(tensor, "to_local", lambda own=tensor: own)().clone() for name, tensor in found.items()}


# -- rollout and weight sync --------------------------------------------------------------------------------------
def _installed(name: str) -> Callable[[int], str | None]:
    def needs(ranks: int) -> str | None:
        engine = OUTSIDE.get(name)
        if engine is not None and not engine.is_installed():
            return f"{name} is not installed ({engine.how_to_install.partition(':')[0]})"
        return None

    return needs


def _team(world: World, name: str) -> Team | None:
    """Neighbours that hold one engine: pairs, where the engine and the number of ranks allow it."""
    by_teams = name not in OUTSIDE or OUTSIDE[name].by_teams
    if name in OUTSIDE and world.device.type == "cuda" and dist.get_backend() == "gloo":
        by_teams = False  # ranks share a GPU: other systems' tensor parallelism takes NCCL, which rejects that
    return team_of(2, world.device) if by_teams and world.size % 2 == 0 else None


def _rollout(world: World, name: str, module: torch.nn.Module, team: Team | None) -> RolloutEngine:
    # The cache has a given size: vLLM would derive it from free memory, which other ranks on the same GPU change.
    config = RolloutConfig(name=name, kv_cache_gb=0.05, max_num_seqs=8)
    if name in OUTSIDE and world.device.type == "cuda":  # the trainer's model lies beside it
        config = RolloutConfig(name=name, kv_cache_gb=0.5, gpu_memory_utilization=0.2, max_num_seqs=8)
    try:
        engine, said = build_engine(
            config, module.requires_grad_(False), world.tokenizer, device=world.device, longest=LONGEST, team=team
        )
    except UserError as error:  # an engine is proved when it is built
        how = ": a rank holds another part of a matrix than its own, or parts are summed wrongly" if team else ""
        raise CheckFailed(f"{error}{how}") from error
    if not said.startswith(name):
        raise CheckFailed(f"the engine {name} does not serve this model: {said}")
    held = f"one engine by {team.size} ranks" if team else "an engine on each rank"
    world.facts.append(f"{said.partition(',')[0]}{')' if '(' in said.partition(',')[0] else ''}, {held}")
    return engine


def _place(world: World, team: Team | None) -> torch.device:
    return torch.device("cpu") if team is not None else world.device


def _dtype(world: World, name: str) -> torch.dtype:
    # Small faults show in float32. On a GPU the attention of other systems is made for bfloat16: in float32 that of
    # vLLM 0.26 gives wrong log-probs, or reads memory that is not its own.
    return torch.bfloat16 if name in OUTSIDE and world.device.type == "cuda" else torch.float32


def check_rollout(world: World, name: str) -> None:
    """Responses have the log-probs of one device, and all ranks of an engine sample the same."""
    team, dtype = _team(world, name), _dtype(world, name)
    engine = _rollout(world, name, world.module(_place(world, team)).to(dtype), team)
    try:
        outputs = generate(engine, PROMPTS, [Sampling(max_tokens=8)] * len(PROMPTS), range(len(PROMPTS)))
    finally:
        _close(engine)
    rows = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    plain = row_log_probs(world.module().to(dtype).eval(), rows)
    parts = [part[-len(output.token_ids) :] for part, output in zip(plain, outputs, strict=True)]
    expected = torch.cat(parts).detach().cpu().float()
    found = torch.tensor([value for output in outputs for value in output.log_probs])
    apart = float((found - expected).abs().max())
    if beyond_rounding(found, expected, dtype) or (dtype == torch.float32 and apart > ALLOWED):
        how = (
            "a rank holds another part of a matrix than its own, or parts are summed wrongly" if team else "it is wrong"
        )
        raise CheckFailed(f"{name}: log-probs are {apart:.1e} from those of one device: {how}")
    if team is not None:
        team.check_same(zlib.crc32(repr([output.token_ids for output in outputs]).encode()), "what it has sampled")
    world.facts.append(f"log-probs within {apart:.1e} of one device")


def check_sync(world: World, name: str, *, adapters: bool) -> None:
    """After an update the rollout computes with the trainer's weights: checksums, and the probe of every run."""
    team = _team(world, name)
    layout = EngineLayout() if world.size > 1 else None
    dtype, place = _dtype(world, name), _place(world, team)
    trainer = world.engine((_adapted(world) if adapters else world.module()).to(dtype), layout)
    beside = adapters and can_take_adapters(name, 1 if team is None else team.size)
    held = (_adapted(world, place) if beside else world.module(place)).to(dtype)
    rollout = _rollout(world, name, held, team)
    try:
        _sync(world, trainer, rollout, first=True)
        train(trainer, world)
        _sync(world, trainer, rollout, first=False)
    finally:
        _close(rollout)


def _sync(world: World, trainer: TrainEngine, rollout: RolloutEngine, *, first: bool) -> None:
    probe = WeightProbe(world.tokenizer, len(world.tokenizer))
    before = probe.score_with_rollout(rollout)
    rollout.sleep()
    rollout.wake("weights")
    beside = rollout.takes_adapters
    sent = list(trainer.export_adapters() if beside else trainer.export_weights())
    total, arrived = 0, set()
    for bucket in split_into_buckets(sent):
        bucket.check()
        rollout.load_weights(bucket.tensors.items(), 1)
        total, arrived = checksum_of_all(total, bucket), arrived | set(bucket.tensors)
    sums = [int(part) for part in world.gathered(torch.tensor([total]))]
    if len(set(sums)) > 1:
        raise CheckFailed(f"ranks were given different weights: checksums {', '.join(f'{one:x}' for one in sums)}")
    missing = [name for name, _ in sent if name not in arrived]
    if missing:
        raise CheckFailed(f"{len(missing)} of {len(sent)} weights never reached the rollout: {missing[0]} is the first")
    try:
        largest = probe.compare(trainer, rollout)["sync/probe_max"]
    except SyncError as error:
        what = "adapters" if beside or trainer.facts().adapters else "weights"
        if not first and torch.equal(before, probe.score_with_rollout(rollout)):
            raise CheckFailed(
                f"the rollout still computes with the {what} before the update: the sync changed nothing"
            ) from None
        raise CheckFailed(f"{error}: {what} that were synced are not those of the trainer, or stale") from None
    rollout.wake("cache")
    world.facts.append(f"{len(sent)} {'adapters' if beside else 'weights'}, checksum {total:x}, probe {largest:.1e}")


def _close(engine: Any) -> None:
    if hasattr(engine, "close"):
        engine.close()


def _of_engine(name: str) -> Iterable[tuple[str, str, Callable[[World], None]]]:
    yield f"{name} rollout", f"{name} samples with the log-probs of one device", lambda w: check_rollout(w, name)
    yield f"{name} sync", f"trained weights reach {name}, proved", lambda w: check_sync(w, name, adapters=False)
    yield f"{name} adapters", f"trained adapters reach {name}, proved", lambda w: check_sync(w, name, adapters=True)


for _engine in ("native", *OUTSIDE):
    for _name, _about, _work in _of_engine(_engine):
        check(_name, _about, _installed(_engine))(_work)


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
    world = World(options.rank, options.ranks, device, options.folder)
    _wait_for_all(options.folder / "found", options.address, options.rank, options.ranks)
    join_ranks(options.rank, options.ranks, options.address, device, timeout_s=options.timeout, backend=backend)
    for name in options.checks:
        written = options.folder / "found" / f"{name} {options.rank}.json"
        begun, world.facts = time.monotonic(), []
        _write(written.with_suffix(".begun"), {})
        try:
            CHECKS[name].run(world)
            if options.ranks > 1:
                dist.barrier()
            error = None
        except (CheckFailed, UserError) as found:
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


def _wait_for_all(folder: Path, address: str, rank: int, ranks: int) -> None:
    """Imports take minutes on a busy machine, and by how much ranks differ in it says nothing of their connections."""
    name = address.replace(":", "_")
    _write(folder / f"ready {name} {rank}", {})
    started_by = os.getppid()
    while not all((folder / f"ready {name} {other}").exists() for other in range(ranks)):
        if os.getppid() != started_by:
            sys.exit("the command that started this rank is gone")
        time.sleep(0.05)


def _write(file: Path, content: dict[str, object]) -> None:
    partial = file.with_suffix(f".partial{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(file)  # the command may read it at any moment


if __name__ == "__main__":
    sys.exit(main())
