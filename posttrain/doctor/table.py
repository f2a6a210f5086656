"""The memory plan as text, and the command that prints it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from posttrain.config import PPOConfig, Resolved
from posttrain.doctor.plan import GIB, USABLE, Counter, Plan, find_device, plan_memory, shown
from posttrain.doctor.remedies import Remedy, find_remedies
from posttrain.errors import UserError

ROWS = (
    *(f"actor {part}" for part in ("weights", "gradients", "optimizer", "activations")),
    *(f"critic {part}" for part in ("weights", "gradients", "optimizer", "activations")),
    "reference weights",
    "reward model weights",
    "rollout weights",
    "KV cache",
    "temporary tensors",
)


def main(args: Sequence[str]) -> int:
    """`posttrain plan`: print the plan; the exit status is 1 if it does not fit."""
    rest, gpu_gb = _gpu_size(args)
    resolved = _resolve(rest)
    if library := resolved.config.actor_rollout_ref.model.external_lib:
        from posttrain.trainer.ppo.external import import_external

        import_external(library)  # the estimator may be registered there
    device = find_device(resolved.config, gpu_gb)
    counter = Counter()
    plan = plan_memory(resolved.config, device, counter)
    print(report(resolved.config, plan, find_remedies(resolved.config, plan, counter)))
    return 0 if plan.fits else 1


def _gpu_size(args: Sequence[str]) -> tuple[list[str], float | None]:
    """(the other arguments, GiB of `--gpu_gb`)."""
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


def _resolve(args: list[str]) -> Resolved:
    """As `posttrain config` reads its arguments: with flags or `train` as train.sh, else as main_ppo."""
    from posttrain import launch
    from posttrain.config import load_config

    request = launch.parse(args[1:] if args[:1] == ["train"] else args)
    if args[:1] == ["train"] or request.flags or not request.rest:
        return launch.resolve(request, os.environ)
    return load_config(request.rest)


def report(config: PPOConfig, plan: Plan, remedies: Sequence[Remedy]) -> str:
    """The table, the verdict, and the settings that would lower the peak."""
    lines = [*_head(config, plan), "", *_table(plan), ""]
    if plan.host:
        lines += [f"In host memory outside their stage: {', '.join(f'{p} {shown(b)}' for p, b in plan.host.items())}."]
    verdict = "It fits" if plan.fits else "It does not fit"
    lines += [
        f"{verdict}: the peak, in {plan.worst}, is {shown(plan.peak())} of {shown(int(USABLE * plan.device.bytes))} "
        f"usable ({USABLE:.0%} of {plan.device.words}).",
        "What lowers it, with the present values:",
        *(f"  {remedy.words()}" for remedy in remedies),
    ]
    return "\n".join(lines)


def _head(config: PPOConfig, plan: Plan) -> list[str]:
    model, shape = config.actor_rollout_ref.model, plan.shape
    rows = shape.micro_rows(config.actor_rollout_ref.actor)
    lines = [
        f"Memory plan of {model.path or 'embedded'} with {config.algorithm.adv_estimator}, for {plan.device.words}.",
        f"Largest micro-batch: {rows} rows x {shape.longest} tokens; at once {shape.wave} responses are generated.",
    ]
    if shape.workers > 1:
        lines.append(
            f"Planned for each of {shape.workers} workers that share weights, gradients and optimizer state; this "
            "version trains with one."
        )
    return lines


def _table(plan: Plan) -> list[str]:
    unit, size = ("GiB", GIB) if plan.peak() >= GIB else ("MiB", 2**20)
    names = [row for row in ROWS if any(row in parts for parts in plan.stages.values())]
    cells = [[unit, *plan.stages]]
    for row in names:
        cells.append([row, *(f"{parts[row] / size:.2f}" if parts.get(row) else "-" for parts in plan.stages.values())])
        if row == "rollout weights" and not plan.largest(row):
            cells[-1][1] = "shared"  # the engine reads the actor's own tensors
    cells.append(["peak", *(f"{plan.peak(stage) / size:.2f}" for stage in plan.stages)])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    ]
