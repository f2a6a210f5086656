"""`posttrain plan`: the memory plan as text, after the checks that the run itself makes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig, Resolved, load_config
from posttrain.config.environment import check_environment
from posttrain.config.resolved import ConfigError
from posttrain.config.schema import Section, lookup
from posttrain.config.trainer import own_workers_of, workers_of
from posttrain.doctor import fleet_command
from posttrain.engine.registry import EngineLayout, engine_class, layout_of
from posttrain.engine.settings import RL as RL_KEYS
from posttrain.engine.settings import SUPERVISED, train_engine
from posttrain.errors import UserError, working_folder
from posttrain.launch import command_tree, resolve_arguments
from posttrain.models import shards
from posttrain.models.decodable import KNOWN, can_decode_fast
from posttrain.models.loading import check_positions, positions_of
from posttrain.planning.budgets import apply_plan, check_group_size, planner_for
from posttrain.planning.memory_plan import (
    GIB,
    Cut,
    Device,
    Plan,
    Planner,
    Remedy,
    find_cuts,
    find_device,
    find_remedies,
    shown,
)
from posttrain.planning.rl import STAGES_APART
from posttrain.planning.supervised import ROLE
from posttrain.rollout.engine_kwargs import check_on_any_machine, check_splitting
from posttrain.rollout.engines import check_engine_name
from posttrain.rollout.native.build import check_can_cut
from posttrain.texts import align_columns
from posttrain.tracking.console import print_text
from posttrain.workers.weight_transport import check_transport

PARTS = ("weights", "gradients", "optimizer", "activations")
ROWS = (
    *(f"actor {part}" for part in PARTS),
    *(f"critic {part}" for part in PARTS),
    "reference weights",
    "reward model weights",
    "rollout weights",
    "KV cache",
    "captured steps",
    "temporary tensors",
    "workspaces",
)


def main(args: Sequence[str]) -> int:
    """`posttrain plan`: print the plan; the exit status is 1 if it does not fit."""
    if fleet_command.wants_fleet(args):
        return fleet_command.main(args, _check_as_the_run_does)
    rest, gpu_gb = _gpu_size(args)
    tree = command_tree("plan", rest)
    resolved = resolve_arguments(rest) if tree is None else load_config(rest[1:] or {}, tree=tree)
    config = resolved.config
    model_section = "actor_rollout_ref.model" if tree is None else tree.model
    if library := lookup(config, model_section).external_lib:
        from posttrain.external import import_external

        import_external(library, f"{model_section}.external_lib")  # models and estimators may be registered there
    planner, device = planner_for(config), find_device(config, gpu_gb)
    _check_as_the_run_does(resolved, device, planner)
    chosen = apply_plan(config, device, resolved.explicit, planner)
    plan = planner.plan(config, device)
    cuts = find_cuts(config, plan, planner)
    print_text(report(config, plan, find_remedies(config, plan, planner), chosen, cuts))
    # Without --gpu_gb the plan is for this machine, which may lack what the run needs.
    if gpu_gb is None and (problems := check_environment(resolved, working_folder())):
        print_text(f"This machine would reject the run. {ConfigError(dict.fromkeys(problems))}")
    elif gpu_gb is not None and tree is None and (problems := [*check_splitting(resolved, working_folder())]):
        print_text(f"The run would be rejected. {ConfigError(dict.fromkeys(problems))}")
    return 0 if plan.fits else 1


def _gpu_size(args: Sequence[str]) -> tuple[list[str], float | None]:
    rest, size = list(args), None
    for place, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name in ("--gpu_gb", "--gpu-gb"):
            text = value if equals else "".join(rest[place + 1 : place + 2])
            del rest[place : place + (1 if equals else 2)]
            try:
                size = float(text)
            except ValueError:
                size = 0.0
            if not 0 < size < float("inf"):
                raise UserError(f"{name} {text}: give the GPU's memory in GiB, for example --gpu_gb 80")
            break
    return rest, size


def _check_as_the_run_does(resolved: Resolved, device: Device, planner: Planner) -> None:
    # A plan for a run that would be rejected is of no use: raise the same error.
    config = resolved.config
    if not isinstance(config, PPOConfig):
        layout = layout_of(config, SUPERVISED, "model")
        planner.count(config, device, ROLE, partial(_check_model, config, layout, config.model.use_remove_padding))
        return
    if problems := list(check_on_any_machine(resolved)):
        raise ConfigError(problems)
    check_engine_name(config.actor_rollout_ref.rollout.name)
    check_transport(config)
    planner.count(config, device, "actor", _ActorChecks(config))
    estimator = get_adv_estimator(config.algorithm.adv_estimator)
    if estimator.needs_critic:
        layout, packed = layout_of(config, RL_KEYS, "critic"), config.critic.model.use_remove_padding
        workers = own_workers_of(config).get("critic")
        planner.count(config, device, "critic", partial(_check_model, config, layout, packed, workers=workers))
    if estimator.compares_group:
        check_group_size(config, resolved.explicit)


def _check_model(config: Any, layout: EngineLayout, packed: bool, module: Any, *, workers: int | None = None) -> None:
    engine_class(layout).check_model(module.config, layout, ranks=workers or workers_of(config), packed=packed)


class _ActorChecks:
    # A class and not a closure, so that the planner can cache its result.
    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    def __call__(self, module: Any) -> None:
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        packed = self.config.actor_rollout_ref.model.use_remove_padding
        _check_model(self.config, layout_of(self.config, RL_KEYS, "actor"), packed, module)
        if rollout.name == "native" and rollout.tensor_model_parallel_size > 1:
            # Other kinds are named below the plan, where another engine could hold them.
            if module.config.model_type in KNOWN:
                check_can_cut(module, can_decode_fast(module), rollout.tensor_model_parallel_size)
            shards.check_heads(module.config.get_text_config(), rollout.tensor_model_parallel_size)
        check_positions(positions_of(module), data.max_prompt_length + data.max_response_length)


def report(
    config: Section,
    plan: Plan,
    remedies: Sequence[Remedy],
    chosen: Sequence[str] = (),
    cuts: Sequence[Cut] = (),
) -> str:
    """The table, the verdict, and the settings that would lower the peak; `chosen` are sentences on what the plan
    chose."""
    lines = [*_head(config, plan), *chosen, "", *_table(plan), ""]
    if plan.host:
        lines += [f"In host memory outside their stage: {', '.join(f'{p} {shown(b)}' for p, b in plan.host.items())}."]
    if plan.saved and config.to_dict()["trainer"]["async_save"]:
        lines += [
            f"A checkpoint is copied to host memory and written from there: {shown(plan.saved)} per worker "
            "(trainer.async_save)."
        ]
    lines += [
        plan.verdict(),
        "What lowers it, with the present values:",
        *(f"  {remedy.words()}" for remedy in remedies),
    ]
    if cuts:
        fit = "that fit" if cuts[0].fits else "with the lowest peak; none fit"
        lines += [f"Sizes of Megatron's ranks {fit}, on {plan.shape.workers} worker(s):"]
        lines += [f"  {cut.words()}" for cut in cuts]
    return "\n".join(lines)


def _head(config: Any, plan: Plan) -> list[str]:
    shape = plan.shape
    if isinstance(config, PPOConfig):
        path, kind = config.actor_rollout_ref.model.path, config.algorithm.adv_estimator
        rows = shape.micro_rows(config.actor_rollout_ref.actor)
        size = f"{rows} rows x {shape.longest} tokens; at once {shape.wave} responses are generated"
    else:
        path, kind = config.model.path, "sft" if shape.together == 1 else "pairs (reward model)"
        size = f"{shape.pass_rows} rows x {shape.longest} tokens, of {shape.batch_rows} rows of a step"
    lines = [
        f"Memory plan of {path or 'embedded'} with {kind}, for {plan.device.words}.",
        f"Largest micro-batch: {size}.",
    ]
    if shape.workers > 1:
        lines.append(f"Planned for each of {shape.workers} workers that share weights, gradients and optimizer state.")
    keys = RL_KEYS if isinstance(config, PPOConfig) else SUPERVISED
    if note := train_engine(lookup(config, keys.strategy), keys).plan_note:
        lines.append(note)
    for role, workers in own_workers_of(config).items():
        columns = [stage for stage, owner in STAGES_APART.items() if owner == role and stage in plan.stages]
        named = f"column {columns[0]} is" if len(columns) == 1 else f"columns {', '.join(columns)} are"
        whose = "that only generate" if role == "rollout" else f"of the {role.replace('_', ' ')}"
        lines.append(f"The {named} of each of the {workers} worker(s) {whose}.")
    return lines


def _table(plan: Plan) -> list[str]:
    unit, size = ("GiB", GIB) if plan.peak() >= GIB else ("MiB", 2**20)
    rows = (*(f"{ROLE} {part}" for part in PARTS), *ROWS)
    names = [row for row in rows if any(row in parts for parts in plan.stages.values())]
    cells = [[unit, *plan.stages]]
    for row in names:
        cells.append([row, *(f"{parts[row] / size:.2f}" if parts.get(row) else "-" for parts in plan.stages.values())])
        if row == "rollout weights" and not plan.largest(row):
            cells[-1][1 + list(plan.stages).index("generate")] = "shared"  # the engine reads the actor's own tensors
    cells.append(["peak", *(f"{plan.peak(stage) / size:.2f}" for stage in plan.stages)])
    return align_columns(cells)
