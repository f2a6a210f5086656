"""One suite of checks for all registered train engines, run once for all tests of `test_megatron.py`:

    python megatron_runs.py FOLDER [cuda | gradients]

With `cuda` the cases of one rank run on that device (`test_megatron_cuda.py`), with `gradients` a few updates alone
(`test_megatron_gradients.py`). Ranks are forked after everything is
imported. Each case (model, engine, how it is cut) writes what every check found.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from engine_tools import TEMPERATURE, objective, ragged_batch
from forked_ranks import run_ranks
from megatron_cases import CASES, GRADIENTS, MIXTURES, layout, write_models
from rank_runs import summed, words

from posttrain import pulse
from posttrain.checkpoint import CheckpointManager
from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig, PolicyLossConfig
from posttrain.engine.base import EngineLayout, EngineSettings, TrainEngine
from posttrain.engine.heads import Head, ScoreHead
from posttrain.engine.megatron.engine import MegatronEngine
from posttrain.engine.megatron.groups import leave_groups
from posttrain.engine.megatron.package import part
from posttrain.engine.megatron.weights import named_weights
from posttrain.engine.micro_batches import plan_passes, plan_ranks
from posttrain.engine.ranks import this_rank, world_size
from posttrain.engine.registry import build_train_engine
from posttrain.models.forward import ValueModel
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapters
from posttrain.models.scorer_loading import load_scorer
from posttrain.planning.megatron_ranks import held_bytes

DEVICE = torch.device("cpu")
LOSSES = ("vanilla", "gspo", "cispo")
LOADED: dict[tuple[Path, torch.dtype], torch.nn.Module] = {}
"""Models in this process, which are proved when they are loaded."""


class Case:
    """Engines over one model, all made alike."""

    def __init__(self, folder: Path, model: str, cut: str) -> None:
        self.folder, self.model, self.cut = folder, model, cut
        self.dtype = torch.float64
        self.name = f"{model} {cut} {world_size()}"

    def module(self, dtype: torch.dtype | None = None) -> torch.nn.Module:
        dtype, path = dtype or self.dtype, self.folder / self.model
        if (path, dtype) not in LOADED:
            # Experts of transformers multiply in float64 one by one only, so such a model is widened after its proof.
            given = torch.float32 if self.model in MIXTURES and dtype == torch.float64 else dtype
            module = load_causal_lm(ModelConfig(path=str(path)), dtype=given, device=DEVICE)
            if given != dtype:
                getattr(module, "config")._experts_implementation = "eager"  # noqa: B009
            LOADED[path, dtype] = module.to(dtype)
        return copy.deepcopy(LOADED[path, dtype])

    def engine(self, module: torch.nn.Module | None = None, head: Head | None = None, **settings: Any) -> TrainEngine:
        module = self.module() if module is None else module
        made = EngineSettings(
            **{"device": DEVICE, "optim": OptimConfig(lr=1e-3), "grad_clip": 1e9, "token_budget": 60, **settings}
        )
        return build_train_engine(module, made, layout(self.cut), head)


def dealt(engine: TrainEngine, batch: Any) -> tuple[Any, Any]:
    """This rank's rows and passes."""
    if world_size() == 1:
        return batch, None
    facts, stage = engine.facts(), world_size() // engine.facts().pipeline
    part = plan_ranks(batch, facts, stage // facts.sequence_parallel)[this_rank() % stage // facts.sequence_parallel]
    return batch[part.rows], part.passes


def copies(engine: TrainEngine) -> int:
    """Ranks that give the same of a sum: the tensor ranks of the last stage, which alone has losses."""
    return engine.facts().sequence_parallel


def train(engine: TrainEngine, *, steps: int = 3, first: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": []}
    dtype = torch.promote_types(engine.facts().dtype, torch.float32)
    for number in range(first, steps):
        loss = objective(policy_loss=PolicyLossConfig(loss_mode=LOSSES[number % len(LOSSES)]))
        batch = loss.prepare(ragged_batch(12, dtype, seed=number, prompts=4 if number % 2 else None))
        rows, passes = dealt(engine, batch)
        step = engine.update(rows, loss, temperature=TEMPERATURE, passes=passes)
        found["losses"].append(summed(loss.metrics().get("actor/loss", 0.0)) / copies(engine))
        found["norms"].append(step["grad_norm"])
    found["weights"] = {name: weight.detach().cpu().clone() for name, weight in engine.export_weights()}
    return found


def scored(engine: TrainEngine) -> dict[str, float]:
    """Sums of what all ranks were given, each row once."""
    rows, passes = dealt(engine, ragged_batch(12, torch.float64, prompts=3))
    found = engine.log_probs(rows, temperature=TEMPERATURE, passes=passes)
    shares = copies(engine) * engine.facts().pipeline
    squares = {name: float(x.double().square().sum()) if len(rows) else 0.0 for name, x in found.items()}
    return {name: summed(squares.get(name, 0.0)) / shares for name in ("log_probs", "entropy")}


# -- checks: each gives what is compared over the cases


def scores(case: Case) -> Any:
    return {"trained": scored(case.engine()), "frozen": scored(case.engine(optim=None))}


def updates(case: Case) -> Any:
    return train(case.engine())


def other_passes(case: Case) -> Any:
    return train(case.engine(token_budget=10**6))


def clipped(case: Case) -> Any:
    return train(case.engine(grad_clip=0.05))


def recomputed(case: Case) -> Any:
    return train(case.engine(gradient_checkpointing=True), steps=2)


def bfloat16(case: Case) -> Any:
    engine = case.engine(case.module(torch.bfloat16))
    found = train(engine)
    assert {weight.dtype for weight in engine.optimizer.masters} == {torch.float32}  # pyright: ignore
    return found


def values(case: Case) -> Any:
    module = ValueModel(case.module())
    torch.manual_seed(5)
    torch.nn.init.normal_(module.value_head.weight, std=0.1)
    engine, norms = case.engine(module), []
    for seed in range(2):
        batch = ragged_batch(12, torch.float64, seed=seed)
        batch.batch["weights"] = batch.batch["response_mask"] / float(batch.batch["response_mask"].sum())
        rows, passes = dealt(engine, batch)
        goal = lambda micro, out: (micro.batch["weights"] * (out["values"] - micro.batch["advantages"]) ** 2).sum()  # noqa: E731
        norms.append(engine.update(rows, goal, passes=passes)["grad_norm"])
    rows, passes = dealt(engine, ragged_batch(12, torch.float64, prompts=3))
    total = summed(float(engine.values(rows, passes=passes).sum())) / copies(engine) / engine.facts().pipeline
    return {"norms": norms, "values": total}


def pairs(case: Case) -> Any:
    """A reward model: both answers of a pair in one pass, and a score at each end."""
    module = load_scorer(str(case.folder / case.model), DEVICE, case.dtype, pad_token_id=0, new_head=True)
    torch.manual_seed(5)
    torch.nn.init.normal_(module.score.weight, std=0.1)
    engine, norms = case.engine(module, ScoreHead(), token_budget=40), []
    goal = lambda micro, out: -torch.nn.functional.logsigmoid(out["scores"][::2] - out["scores"][1::2]).sum() / 6  # noqa: E731
    for seed in range(2):
        rows, passes = dealt(engine, ragged_batch(12, torch.float64, seed=seed, prompts=6))
        norms.append(engine.update(rows, goal, passes=passes)["grad_norm"])
    rows, passes = dealt(engine, ragged_batch(12, torch.float64, prompts=3))
    total = summed(float(engine.scores(rows, passes=passes).sum())) / copies(engine) / engine.facts().pipeline
    weights = {name: weight.detach().cpu().clone() for name, weight in engine.export_weights()}
    return {"norms": norms, "scores": total, "weights": weights}


def progress(case: Case) -> Any:
    """Rows count when their pass was computed, not before; all of them at the end."""
    engine, loss = case.engine(token_budget=30), objective()
    rows, passes = dealt(engine, loss.prepare(ragged_batch(12, torch.float64)))
    passes = plan_passes(rows, engine.facts()) if passes is None else passes
    assert len(passes) > 2
    computed, forward, counted, advance = [], engine.runner.stage.forward, [], pulse.Work.advance  # pyright: ignore
    chunks = engine.runner.stage.pipeline.chunks  # pyright: ignore
    engine.runner.stage.forward = lambda *given: computed.extend([1] * (given[3] == chunks - 1)) or forward(*given)  # pyright: ignore
    pulse.Work.advance = lambda self, *given: counted.append(len(computed)) or advance(self, *given)
    found = {}
    try:
        for name, call in {
            "compute": lambda: engine.log_probs(rows, passes=passes),
            "update": lambda: engine.update(rows, loss, passes=passes),
        }.items():
            computed.clear()
            counted.clear()
            with pulse.work("rows", len(rows)) as work:
                call()
            on_time = len(counted) == len(passes) and all(n >= place + 1 for place, n in enumerate(counted))
            soon = all(n <= place + chunks * engine.facts().pipeline for place, n in enumerate(counted))
            found[name] = float(on_time and soon and work.done == len(rows))
    finally:
        pulse.Work.advance = advance
    return found


def stretches(case: Case) -> Any:
    """How many times fewer tokens than a pass has lie between the layers of this rank, and in attention; and the
    weights of the fullest rank in proportion to the memory plan's."""
    engine = case.engine()
    if not isinstance(engine, MegatronEngine):
        return {}
    stage: Any = engine.runner.stage
    seen: dict[str, int] = {}
    attention = stage.module.decoder.layers[0].self_attention
    for name, module in {
        "between layers": stage.module.decoder.layers[0],
        "in attention": attention.linear_proj,
    }.items():

        def see(module: Any, given: Any, named: Any, name: str = name) -> None:
            seen[name] = len(given[0] if given else named["hidden_states"])

        module.register_forward_pre_hook(see, with_kwargs=True)
    rows, passes = dealt(engine, ragged_batch(12, torch.float64))
    passes = plan_passes(rows, engine.facts()) if passes is None else passes
    engine.log_probs(rows, passes=passes)
    whole = sum(unit.tokens for unit in passes[-1])
    held = torch.tensor(sum(weight.numel() * weight.itemsize for weight in named_weights(stage.module).values()))
    if world_size() > 1:
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
    planned = held_bytes(case.module(), engine.groups.sizes, world_size()).weights
    return {"weights": float(held) / planned, **{name: whole / count for name, count in seen.items()}}


def not_finite(case: Case) -> Any:
    engine = case.engine()
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    rows, passes = dealt(engine, ragged_batch(12, torch.float64))
    last = this_rank() == world_size() - 1
    worse = lambda micro, out: out["log_probs"].sum() * 1e-3 + (float("inf") if last else 0.0)  # noqa: E731
    skipped = engine.update(rows, worse, passes=passes)["skipped"]
    same = all(torch.equal(before[name], weight) for name, weight in engine.export_weights())
    return {"skipped": summed(skipped) / world_size(), "same": float(same)}


def trial(case: Case) -> Any:
    engine, loss = case.engine(), objective()
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    rows, passes = dealt(engine, loss.prepare(ragged_batch(12, torch.float64)))
    engine.trial_pass(rows, loss, passes=passes)
    gradients = [weight.grad for weight in engine.optimizer.masters]  # pyright: ignore
    same = all(torch.equal(before[name], weight) for name, weight in engine.export_weights())
    return {"left": float(sum(one is not None for one in gradients)), "same": float(same)}


def resumed(case: Case) -> Any:
    """Whether a step from a checkpoint ends in the same bits as one that went on."""
    engine = case.engine()
    train(engine, steps=2)
    manager, staged = CheckpointManager(case.folder / f"checkpoints {case.name}"), case.folder / f"staged {case.name}"
    engine.save(staged)
    summed(0)
    if this_rank() == 0:
        manager.save(1, tensors={"actor": lambda folder: staged.rename(folder)}, state={}, rng={})
    summed(0)
    went_on, other = train(engine, first=2), case.engine()
    other.load(manager.role_folder(manager.path_of(1), "actor"))
    again = train(other, first=2)
    weights = went_on.pop("weights"), again.pop("weights")
    same = went_on == again and all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    return {"same": float(same)}


def exported(case: Case) -> Any:
    """The folder, as transformers loads it, and the loaded weights, which both are those of the beginning."""
    from transformers import AutoModelForCausalLM

    engine, folder = case.engine(), case.folder / f"exported {case.name}"
    here = {name: weight.cpu().clone() for name, weight in engine.export_weights()}
    engine.export_hf(folder, None, merged=False)
    summed(0)
    whole = {name: weight.cpu() for name, weight in case.module().state_dict().items()}
    assert here.keys() == whole.keys() and all(torch.equal(here[name], whole[name]) for name in whole)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype).state_dict()
    return {"same": float(all(torch.equal(loaded[name].to(whole[name]), whole[name]) for name in whole))}


def facts(case: Case) -> Any:
    found = case.engine().facts()
    return {"parameters": found.parameters, "vocabulary": found.vocabulary, "trained": found.trained}


def moved(case: Case) -> Any:
    engine = case.engine(param_offload=True, optimizer_offload=True)
    with engine.on_device(optimizer=True):
        return train(engine, steps=2)


def adapted_module(case: Case) -> torch.nn.Module:
    torch.manual_seed(7)  # the same adapters on all ranks
    where = {"target_modules": ADAPTED[case.model]} if case.model in ADAPTED else {}
    module = add_adapters(case.module(), ModelConfig(lora_rank=4, lora_alpha=6, **where))
    for name, weight in module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.1)  # peft's zeros would hide what they are multiplied with
    return module


def adapters(case: Case) -> Any:
    """LoRA: scores with and without adapters, updates, the adapter's own files, and a step from a checkpoint."""
    from safetensors.torch import load_file

    engine = case.engine(adapted_module(case))
    found: dict[str, Any] = {"scores": scored(engine), "trained": float(engine.facts().trained)}
    with engine.base_only():
        found["base"] = scored(engine)
    found["updates"] = train(engine, steps=2)
    # What a weight sync hands to a rollout that holds the base: the same names and values from every engine.
    found["alone"] = {name: weight.detach().cpu().clone() for name, weight in engine.export_adapters()}
    settings, folder = engine.facts().adapters, case.folder / f"adapter {case.name}"
    engine.export_hf(folder, settings, merged=False)
    engine.export_hf(case.folder / f"merged {case.name}", settings, merged=True)
    staged, manager = case.folder / f"staged lora {case.name}", CheckpointManager(case.folder / f"lora {case.name}")
    engine.save(staged)
    summed(0)
    if this_rank() == 0:
        manager.save(1, tensors={"actor": lambda folder: staged.rename(folder)}, state={}, rng={})
    summed(0)
    found["adapter"] = load_file(folder / "adapter_model.safetensors")
    went_on, other = train(engine, first=2), case.engine(adapted_module(case))
    other.load(manager.role_folder(manager.path_of(1), "actor"))
    again = train(other, first=2)
    weights = went_on.pop("weights"), again.pop("weights")
    same = went_on == again and all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    return found | {"resumed": float(same)}


CHECKS: list[Callable[[Case], Any]] = [
    scores, updates, other_passes, clipped, recomputed, bfloat16, values, pairs, progress, stretches, not_finite,
    trial, resumed, exported, facts, moved, adapters,
]  # fmt: skip
WHOLE = ("qwen2",)
FEW = (scores, updates, stretches, resumed, exported)
"""Of models beside these, which go through the same code but for their shapes."""
RECUT = ("qwen2", "deepseek_v3")
"""Models whose checkpoints are continued with other tensor ranks."""
ELSEWHERE = {4: "megatron 2,1,1", 1: "megatron 1,1,1"}
"""Numbers of ranks that continue these checkpoints of two, and how they cut the model: two copies of it, and whole."""
ADAPTED = {
    "deepseek_v3": "all-linear",  # all matrices of its attention, and none beside its experts
    "glm4_moe": ["q_proj", "v_proj", "o_proj"],  # keys, which lie in the same matrix, have none
}
"""Models beside these whose adapters are checked, too, and where these lie."""


def refusals(folder: Path) -> dict[str, str]:
    """What one process is told."""

    def told(model: str, cut: str, **settings: Any) -> str:
        case = Case(folder, model, cut)
        return words(lambda: case.engine(**settings))

    adapted, on_head = Case(folder, "llama", "megatron 1,1,1"), ModelConfig(lora_rank=4, target_modules=["lm_head"])
    return {
        "ranks": told("qwen2", "megatron 2,1,1"),
        "expert ranks": told("qwen3_moe", "megatron 1,1,2"),
        "heads": told("qwen2", "megatron 8,1,1"),
        "layers": told("qwen2", "megatron 1,3,1"),
        "chunks": told("qwen2", "megatron 1,2,1 virtual=2"),
        "context": told("qwen2", "megatron 1,1,1 context=3"),
        "dense": told("qwen2", "megatron 1,1,2"),
        "experts": told("mixtral", "megatron 1,1,3"),
        "padded": told("qwen2", "megatron 1,1,1", pack=False),
        "adapters": words(lambda: adapted.engine(add_adapters(adapted.module(), on_head))),
    }


def recut(folder: Path) -> dict[str, Any]:
    """What follows from a checkpoint of two tensor ranks: there, and where two stages or two copies continue it."""
    found: dict[str, Any] = {}
    for model in RECUT:
        case = Case(folder, model, "megatron 2,1,1")
        engine = case.engine()
        train(engine, steps=2)
        manager, staged = CheckpointManager(folder / f"recut {model}"), folder / f"staged recut {model}"
        engine.save(staged)
        summed(0)
        if this_rank() == 0:
            manager.save(1, tensors={"actor": lambda place, staged=staged: staged.rename(place)}, state={}, rng={})
        summed(0)
        found[model] = {case.cut: train(engine, first=2)}
        for cut in ("megatron 1,2,1", "megatron 1,1,1"):
            leave_groups()
            found[model][cut] = continued(folder, model, cut)
        leave_groups()
    return found


def continued(folder: Path, model: str, cut: str) -> dict[str, Any]:
    """The step after the checkpoint of `recut`."""
    engine, manager = Case(folder, model, cut).engine(), CheckpointManager(folder / f"recut {model}")
    engine.load(manager.role_folder(manager.path_of(1), "actor"))
    return train(engine, first=2)


def moments(folder: Path) -> dict[str, float]:
    """The share of all moments that this rank of two holds; and that both ways of holding them step alike."""
    found: dict[str, Any] = {}
    for shared in (True, False):
        made = EngineSettings(device=DEVICE, optim=OptimConfig(lr=1e-3), grad_clip=1e9, token_budget=60)
        case = Case(folder, "qwen3", "megatron 1,1,1")
        own = EngineLayout("megatron", own={"use_distributed_optimizer": shared})
        engine = build_train_engine(case.module(torch.bfloat16), made, own)
        found[f"weights {shared}"] = train(engine, steps=2)["weights"]
        held = engine.optimizer.state()  # pyright: ignore
        held = sum(tensor.numel() for name, tensor in held.items() if name.startswith("optim.exp_avg_sq."))
        found[f"share {shared}"] = held / sum(weight.numel() for weight in engine.module.parameters())  # pyright: ignore
    leave_groups()
    return found


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    if DEVICE.type == "cuda":
        torch.use_deterministic_algorithms(True)  # resuming is bitwise exact only so
    for model, cut, world in CASES:
        if world == ranks:
            case = Case(folder, model, cut)
            checks = CHECKS if model in WHOLE else (*FEW, adapters) if model in ADAPTED else FEW
            found = {check.__name__: check(case) for check in checks}
            if rank == 0:
                torch.save(found, folder / f"{case.name}.pt")
            leave_groups()
    if ranks == 2:
        others = recut(folder) | {"moments": moments(folder)}
        if rank == 0:
            torch.save(others, folder / "recut.pt")
    if ranks in ELSEWHERE and (folder / "recut.pt").exists():
        others = {}
        for model in RECUT:
            others[model] = continued(folder, model, ELSEWHERE[ranks])
            leave_groups()
        if rank == 0:
            torch.save(others, folder / f"recut on {ranks}.pt")
    if ranks == 1:
        torch.save(refusals(folder), folder / "refusals.pt")


def run_gradients(rank: int, ranks: int, folder: Path) -> None:
    for model, cut, world in GRADIENTS:
        if world == ranks:
            found = updates(case := Case(folder, model, cut))
            if rank == 0:
                torch.save(found, folder / f"{case.name}.pt")
            leave_groups()


if __name__ == "__main__":
    target, wanted = Path(sys.argv[1]), sys.argv[2] if sys.argv[2:] else "cpu"
    DEVICE = torch.device("cpu" if wanted == "gradients" else wanted)
    for name in ("models.gpt", "models.gpt.gpt_layer_specs", "parallel_state", "transformer"):
        part(name)
    write_models(target)
    if DEVICE.type == "cuda":
        run_rank(0, 1, target)  # a forked process cannot use the device
    elif wanted == "gradients":
        sys.exit(not all(run_ranks(ranks, run_gradients, target) for ranks in (1, 2)))
    else:
        sys.exit(not all(run_ranks(ranks, run_rank, target) for ranks in (2, *ELSEWHERE)))
