"""The same work on 4, 2 and 1 processes, run once for all tests of `test_ranks.py`:

    python rank_runs.py FOLDER MODEL

Ranks are forked after everything is imported. Each world writes `world_N.pt`: what every check found there. All worlds
go over the same rows with the same weights; the rows are dealt out unevenly, so that some ranks have passes
without any.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from engine_tools import VOCABULARY, HeldCopies, objective, ragged_batch
from forked_ranks import run_ranks

from posttrain.batch.fields import ROUTES
from posttrain.checkpoint import CheckpointManager
from posttrain.checkpoint.parts import WRITTEN, take_report
from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.engine import torch_engine
from posttrain.engine.base import EngineSettings
from posttrain.engine.heads import ScoreHead
from posttrain.engine.ranks import group_ranks, this_rank, world_size
from posttrain.engine.torch_engine import TorchEngine, sharded_parts
from posttrain.errors import UserError
from posttrain.models import fused_layer
from posttrain.models.attention import ATTENTION
from posttrain.models.forward import ForwardMode, ValueModel
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapters
from posttrain.models.scorer_loading import load_scorer
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

CPU = torch.device("cpu")
WORLDS = (4, 2, 1)
STEPS = 3


class World:
    """The folder of all worlds, and engines over one tiny model."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def language_model(self, dtype: torch.dtype) -> torch.nn.Module:
        return load_causal_lm(ModelConfig(path=str(self.model)), dtype=dtype, device=CPU)

    def engine(self, module: torch.nn.Module, *, head=None, fsdp_size=-1, sequence_size=1, **settings) -> TorchEngine:
        ranks = group_ranks(CPU, fsdp_size=fsdp_size, sequence_size=sequence_size)
        defaults: dict[str, Any] = {"optim": OptimConfig(lr=1e-3), "grad_clip": 1e9, "token_budget": 120}
        return TorchEngine(module, EngineSettings(device=CPU, ranks=ranks, **{**defaults, **settings}), head)


def dealt(data: DataProto, engine: TorchEngine, *, groups: int = 1) -> tuple[DataProto, list]:
    """This rank's rows and passes. Rank 0 gets none but the leftovers: a quarter of the rows of the others."""
    hands = world_size() // groups
    shares: list[list[int]] = [[] for _ in range(hands)]
    for row in range(0, len(data), 2):  # pairs stay together
        shares[row // 2 % (4 * hands) % hands if row // 2 % (4 * hands) else 0] += [row, row + 1]
    if hands > 1:
        shares[1] += shares[0][2:]
        shares[0] = shares[0][:2]
    plans = [engine.runner.plan(data[share]) if share else [] for share in shares]
    most, mine = max(map(len, plans)), this_rank() // groups
    return data[shares[mine]], [*plans[mine], *[[]] * (most - len(plans[mine]))]


def batches(dtype: torch.dtype, steps: int = STEPS) -> list[DataProto]:
    return [ragged_batch(16, dtype, seed=seed, prompts=4 if seed % 2 else None) for seed in range(steps)]


def train(
    engine: TorchEngine, dtype: torch.dtype, *, groups: int = 1, steps: int = STEPS, first: int = 0
) -> dict[str, Any]:
    """Losses (summed over ranks), gradient norms and log-probs of the steps, and the weights after them."""
    found: dict[str, Any] = {"losses": [], "norms": []}
    for batch in batches(dtype, steps)[first:]:
        loss = objective()
        rows, passes = dealt(loss.prepare(batch), engine, groups=groups)
        step = engine.update(rows, loss, passes=passes)
        share = loss.metrics().get("actor/loss", 0.0)
        found["losses"].append(summed(share) / groups)
        found["norms"].append(step["grad_norm"])
    rows, passes = dealt(batches(dtype, 1)[0], engine, groups=groups)
    found["log_probs"] = (
        summed(
            float(part.double().sum())
            if (part := engine.log_probs(rows, passes=passes).get("log_probs")) is not None
            else 0.0
        )
        / groups
    )
    found["weights"] = dict(engine.export_weights())
    found["weights"] = {name: weight.detach().clone() for name, weight in found["weights"].items()}
    return found


def summed(number: float) -> float:
    tensor = torch.tensor(float(number), dtype=torch.float64)
    if world_size() > 1:
        torch.distributed.all_reduce(tensor)
    return float(tensor)


# -- checks: each gives what is compared over the worlds


def float64(world: World) -> Any:
    return train(world.engine(world.language_model(torch.float64)), torch.float64)


def float32_fused(world: World) -> Any:
    calls = 0
    plain = fused_layer._FusedLayer.forward

    def counted(*args):
        nonlocal calls
        calls += 1
        return plain(*args)

    fused_layer._FusedLayer.forward = staticmethod(counted)
    try:
        found = train(world.engine(world.language_model(torch.float32)), torch.float32)
    finally:
        fused_layer._FusedLayer.forward = staticmethod(plain)
    return {**found, "fused": calls}


def clipped(world: World) -> Any:
    return train(world.engine(world.language_model(torch.float64), grad_clip=0.05), torch.float64)


def checkpointed_layers(world: World) -> Any:
    engine = world.engine(world.language_model(torch.float32), gradient_checkpointing=True)
    return train(engine, torch.float32)


def padded(world: World) -> Any:
    return train(world.engine(world.language_model(torch.float64), pack=False), torch.float64)


def bfloat16(world: World) -> Any:
    engine = world.engine(world.language_model(torch.bfloat16))
    found = train(engine, torch.float32)
    return {**found, "held": sorted({str(weight.dtype) for weight in engine.optimizer.masters})}


def loaded(world: World) -> Any:
    """What a rank has in memory of its own while a model of its folder's type is cut, and what comes out of it."""
    folder = world.folder / f"bfloat16_{world_size()}_{this_rank()}"
    shutil.copytree(world.model, folder)
    low = {name: weight.bfloat16() for name, weight in load_file(world.model / "model.safetensors").items()}
    save_file(low, folder / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.bfloat16, device=CPU)
    pages, plain, own, parts = pages_of(folder / "model.safetensors"), torch_engine.fully_shard, [], []
    before = own_bytes(model, pages)

    def watched(part, **named):
        own.append(own_bytes(model, pages))
        parts.append(own_bytes(part))
        return plain(part, **named)

    torch_engine.fully_shard = watched
    try:
        engine = world.engine(model)
    finally:
        torch_engine.fully_shard = plain
    same = {name: weight.equal(low.get(name, weight)) for name, weight in engine.export_weights()}
    return {"before": before, "own": own, "parts": parts, "same": all(same.values()) and low.keys() <= same.keys()}


def pages_of(file: Path) -> list[range]:
    """Where a file lies in this process's memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def own_bytes(module: torch.nn.Module, pages: Sequence[range] = ()) -> int:
    """Of its weights that are not cut: their size, those in these pages aside."""
    whole = [weight for weight in module.parameters() if not isinstance(weight, DTensor)]
    return sum(weight.nbytes for weight in whole if not any(weight.data_ptr() in part for part in pages))


def moved(world: World) -> Any:
    """Weights and moments that lie elsewhere between updates; here, in other memory of the same device."""
    plain = torch.nn.Module.to
    torch.nn.Module.to = lambda self, device: self._apply(torch.Tensor.clone)  # pyright: ignore
    try:
        engine = world.engine(world.language_model(torch.float64), param_offload=True, optimizer_offload=True)
        for number in range(STEPS):
            with engine.on_device(optimizer=True):
                found = train(engine, torch.float64, steps=number + 1, first=number)
    finally:
        torch.nn.Module.to = plain
    return found


def copies(world: World) -> Any:
    """HSDP: two ranks hold a model, the pairs are copies."""
    if world_size() < 4:
        return None
    engine = world.engine(world.language_model(torch.float64), fsdp_size=2, token_budget=60)
    return {"reduced": count_all_reduces(engine), **train(engine, torch.float64)}


def sequence(world: World) -> Any:
    """Ulysses: neighbouring ranks share the tokens of the same rows."""
    if world_size() == 1:
        return None
    engine = world.engine(world.language_model(torch.float64), sequence_size=2)
    return train(engine, torch.float64, groups=2)


def sequence_float32(world: World) -> Any:
    if world_size() != 2:
        return None
    engine = world.engine(world.language_model(torch.float32), sequence_size=2, gradient_checkpointing=True)
    return train(engine, torch.float32, groups=2)


def sequence_pairs(world: World) -> Any:
    return pairs(world, sequence_size=2) if world_size() == 2 else None


def count_all_reduces(engine: TorchEngine) -> tuple[int, int, int]:
    """(passes of an update, all-reduces of gradients in it, parts whose gradients are reduced)."""
    loss, plain, count = objective(), torch.distributed.all_reduce, 0
    rows, passes = dealt(loss.prepare(batches(torch.float64, 1)[0]), engine)

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        engine.trial_pass(rows, loss, passes=passes)
    finally:
        torch.distributed.all_reduce = plain
    return len(passes), count, len(sharded_parts(engine.stage.forward_pass))


def adapters(world: World) -> Any:
    return train_adapters(world, world.language_model(torch.float64), "all-linear", "")


def expert_adapters(world: World) -> Any:
    """Beside attention, and beside every expert of a mixture."""
    with float64_routers():
        return train_adapters(world, small_mixture(), ["all-linear", "experts"], "_experts", token_budget=60)


def expert_adapters_recomputed(world: World) -> Any:
    with float64_routers():
        return train_adapters(world, small_mixture(), ["all-linear", "experts"], None, gradient_checkpointing=True)


@contextmanager
def float64_routers() -> Iterator[None]:
    """transformers' routers round to float32, which shows once weights differ in their last bits."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def route(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        return logits, *logits.softmax(-1).topk(self.top_k)

    before, Qwen3MoeTopKRouter.forward = Qwen3MoeTopKRouter.forward, route
    try:
        yield
    finally:
        Qwen3MoeTopKRouter.forward = before


def train_adapters(world: World, module: Any, targets: Any, exported: str | None, **settings: Any) -> Any:
    torch.manual_seed(3)
    module = add_adapters(module, ModelConfig(lora_rank=4, lora_alpha=8, target_modules=targets))
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    engine = world.engine(module, **settings)
    found = train(engine, torch.float64)
    rows, passes = dealt(batches(torch.float64, 1)[0], engine)
    with engine.base_only():
        found["base"] = summed(float(engine.log_probs(rows, passes=passes)["log_probs"].sum()))
    if exported is not None:
        engine.export_hf(world.folder / f"merged{exported}_{world_size()}", engine.facts().adapters, merged=True)
        engine.export_hf(world.folder / f"adapter{exported}_{world_size()}", engine.facts().adapters, merged=False)
    return found


def value_head(world: World) -> Any:
    module = ValueModel(world.language_model(torch.float64))
    torch.manual_seed(5)
    torch.nn.init.normal_(module.value_head.weight, std=0.1)
    engine = world.engine(module)
    norms = []
    for batch in batches(torch.float64):
        batch.batch["weights"] = batch.batch["response_mask"] / float(batch.batch["response_mask"].sum())
        rows, passes = dealt(batch, engine)
        goal = lambda micro, out: (micro.batch["weights"] * (out["values"] - micro.batch["advantages"]) ** 2).sum()  # noqa: E731
        norms.append(engine.update(rows, goal, passes=passes)["grad_norm"])
    rows, passes = dealt(batches(torch.float64, 1)[0], engine)
    return {"norms": norms, "values": summed(float(engine.values(rows, passes=passes).sum()))}


def pairs(world: World, sequence_size: int = 1) -> Any:
    module = load_scorer(str(world.model), CPU, torch.float64, pad_token_id=0, new_head=True)
    engine = world.engine(module, head=ScoreHead(), sequence_size=sequence_size)
    norms, losses = [], []
    for batch in batches(torch.float64):
        rows, passes = dealt(batch, engine, groups=sequence_size)
        total = 0.0

        def loss(micro, out):
            nonlocal total
            share = -torch.nn.functional.logsigmoid(out["scores"][::2] - out["scores"][1::2]).sum() / 8
            total += float(share.detach())
            return share

        norms.append(engine.update(rows, loss, passes=passes)["grad_norm"])
        losses.append(summed(total) / sequence_size)
    return {"norms": norms, "losses": losses}


def mixture(world: World) -> Any:
    """Experts as recorded, and the load-balance loss: its loads are those of all ranks."""
    return train_mixture(world)


def mixture_recomputed(world: World) -> Any:
    return train_mixture(world, gradient_checkpointing=True, token_budget=60)


def mixture_sequence(world: World) -> Any:
    return train_mixture(world, groups=2, sequence_size=2) if world_size() > 1 else None


def train_mixture(world: World, *, groups: int = 1, **settings: Any) -> Any:
    engine = world.engine(small_mixture(), replay_routes=True, balance_load=True, **settings)
    assert engine.stage.routes is not None
    found: dict[str, Any] = {"losses": [], "norms": [], "loads": [], "changes": []}
    for batch in batches(torch.float64):
        batch.non_tensor_batch[ROUTES] = any_routes(batch, engine.stage.routes)
        loss = objective(router_aux_loss_coef=0.5)
        rows, passes = dealt(loss.prepare(batch), engine, groups=groups)
        step = engine.update(rows, loss, passes=passes)
        found["losses"].append(summed(loss.metrics().get("actor/loss", 0.0)) / groups)
        found["changes"].append(summed(loss.metrics().get("actor/route_changes", 0.0)) / groups)
        found["norms"].append(step["grad_norm"])
        found["loads"].append(step["expert_load_max"])
    weights = dict(engine.export_weights())
    return {**found, "weights": {name: weight.detach().clone() for name, weight in weights.items()}}


def small_mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    config._attn_implementation = ATTENTION
    model = Qwen3MoeForCausalLM(config).double().eval()
    model.set_experts_implementation("eager")  # grouped products have no float64
    model.forward_mode = ForwardMode(packed=True, padded=True)
    fused_layer.fuse_norms(model)
    return model


def any_routes(batch: DataProto, shape: Any) -> list[np.ndarray]:
    """By position and token, so that what rows share has the same routes in all of them, as from one engine."""
    found = []
    for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), strict=True):
        tokens = enumerate(ids[mask][:-1].tolist())
        drawn = [np.random.default_rng(each).random((shape.layers, shape.experts)) for each in tokens]
        found.append(np.stack(drawn).argsort(-1)[..., : shape.top_k].astype(shape.dtype))
    return found


def not_finite(world: World) -> Any:
    """The loss of one rank alone is infinite: all skip the step."""
    engine = world.engine(world.language_model(torch.float64))
    before = dict(engine.export_weights())
    before = {name: weight.clone() for name, weight in before.items()}
    rows, passes = dealt(batches(torch.float64, 1)[0], engine)
    last = this_rank() == world_size() - 1
    worse = lambda micro, out: out["log_probs"].sum() * 1e-3 + (float("inf") if last else 0.0)  # noqa: E731
    skipped = engine.update(rows, worse, passes=passes)["skipped"]
    same = all(torch.equal(before[name], weight) for name, weight in engine.export_weights())
    return {"skipped": summed(skipped) / world_size(), "same": same}


def checkpoint(world: World) -> Any:
    """Steps 3 and 4 from what this world saved after 2, and from what larger ones did."""
    engine = world.engine(world.language_model(torch.float64))
    train(engine, torch.float64, steps=2)
    manager = CheckpointManager(world.folder / "checkpoints")
    step = world_size()
    if step == 1:
        manager.save(step, tensors={"actor": engine.save}, state={}, rng={})
    else:
        engine.save(staged(world, step))
        behind = world.folder / f"behind_{step}"
        with HeldCopies(engine.state.copies):  # the next step changes every tensor, but not those that are copied
            assert engine.begin_save(behind) is None
            train(engine, torch.float64, steps=3, first=2)
        torch.distributed.barrier()
        if this_rank() == 0:
            take_report(behind, WRITTEN)
            same = {file.name: file.read_bytes() == (behind / file.name).read_bytes() for file in behind.iterdir()}
            assert len(same) == step + 1 and all(same.values()), same
            manager.save(step, tensors={"actor": lambda folder: staged(world, step).rename(folder)}, state={}, rng={})
        torch.distributed.barrier()
    found = {}
    for saved in (size for size in WORLDS if size >= world_size()):
        other = world.engine(world.language_model(torch.float64))
        other.load(manager.role_folder(manager.path_of(saved), "actor"))
        found[f"from_{saved}"] = train(other, torch.float64, steps=4, first=2)
    other.export_hf(world.folder / f"exported_{world_size()}", None, merged=False)
    return found


def without_answers(world: World) -> Any:
    """A rank whose rows have no response token at all."""
    answers = [[1, 2, 3], [], [4], [], [9, 9], []]
    outputs = [Output(row, ids, [0.0] * len(ids), "stop") for row, ids in enumerate(answers)]
    whole = to_batch([[7, 8], [5]] * 3, outputs, pad_token_id=0)
    engine = world.engine(world.language_model(torch.float64))
    rows = whole[list(range(this_rank() % 2, 6, 2))] if world_size() == 2 else whole
    passes = engine.runner.plan(rows) if this_rank() < 2 else [[]]
    shares = lambda micro, out: (out["log_probs"] * micro.batch["response_mask"]).sum()  # noqa: E731
    return {"norm": engine.update(rows, shares, passes=passes)["grad_norm"]} if world_size() < 4 else None


def refusals(world: World) -> Any:
    if world_size() < 4:
        return None
    model = world.language_model(torch.float32)
    return {
        "fsdp": words(lambda: group_ranks(CPU, fsdp_size=3)),
        "heads": words(lambda: world.engine(model, sequence_size=4)),
        "padded": words(lambda: world.engine(model, sequence_size=2, pack=False)),
    }


def words(call: Callable[[], object]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    raise AssertionError("it was not refused")


def staged(world: World, step: int) -> Path:
    return world.folder / f"staged_{step}"


CHECKS: list[Callable[[World], Any]] = [
    float64, float32_fused, clipped, checkpointed_layers, padded, bfloat16, loaded, moved, copies, adapters,
    expert_adapters, expert_adapters_recomputed,
    value_head, pairs, sequence, sequence_float32, sequence_pairs, mixture, mixture_recomputed, mixture_sequence,
    not_finite, checkpoint,
    without_answers, refusals,
]  # fmt: skip


def run_rank(rank: int, ranks: int, folder: Path, model: Path) -> None:
    found = {check.__name__: check(World(folder, model)) for check in CHECKS}
    if rank == 0:
        torch.save(found, folder / f"world_{ranks}.pt")


if __name__ == "__main__":
    warnings.filterwarnings("error", "FSDP2-wrapped")
    sys.exit(not all(run_ranks(ranks, run_rank, Path(sys.argv[1]), Path(sys.argv[2])) for ranks in WORLDS))
