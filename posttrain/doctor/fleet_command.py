"""`posttrain plan --gpus N --model NAME`: a layout for many GPUs, its memory, traffic and time, as text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import PPOConfig, Resolved, load_config, needs_reference
from posttrain.errors import UserError
from posttrain.planning.budgets import planner_for
from posttrain.planning.fleet.constants import Constants, parse_assumed
from posttrain.planning.fleet.costs import Pricing, StepCosts, Work
from posttrain.planning.fleet.search import AHEAD, Found, Search, Tried, settings_of
from posttrain.planning.fleet.shapes import ModelCosts, model_path
from posttrain.planning.memory_plan import GIB, USABLE, Device, shown
from posttrain.tracking.terminal_text import print_text

H200_GIB = 139.8
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
# A step as large runs have them; settings that you give replace these.
USUAL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 512,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 8192,
    "actor_rollout_ref.model.dtype": "bfloat16",
}
REJECTED = 6  # layouts that did not fit are named, the fastest ones


def wants_fleet(args: Sequence[str]) -> bool:
    return any(argument.split("=")[0] == "--gpus" for argument in args)


def main(args: Sequence[str]) -> int:
    """Print the plan; the exit status is 1 if no layout fits."""
    options, settings = _options(args)
    constants = Constants.given(parse_assumed(options.assume))
    with model_path(options.model) as path:
        resolved = _settings(path, settings)
        config, planner = resolved.config, planner_for(resolved.config)
        words = f"a GPU of {options.gpu_gb:g} GiB" if options.gpu_gb else f"an H200 ({H200_GIB:g} GiB)"
        device = Device("cuda", int((options.gpu_gb or H200_GIB) * GIB), words, hopper=not options.gpu_gb)
        model = planner.count(config, device, "actor", ModelCosts.of)
        work = work_of(config, options.mean_response)
        pricing = Pricing(model, work, constants, options.gpus_per_machine)
        found = Search(config, resolved.explicit, planner, device, pricing).run(options.gpus)
        if chosen := found.chosen:
            constants.used.clear()  # the constants of this layout are printed, not those of all that were tried
            pricing.of(chosen.layout)
    print_text(
        "\n".join([*_head(options, model, work, device), "", *_body(found, options, device), *_constants(constants)])
    )
    return 0 if found.chosen else 1


def _options(args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("posttrain plan", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpu_gb", "--gpu-gb", type=float)
    parser.add_argument("--gpus_per_machine", "--gpus-per-machine", type=int, default=8)
    parser.add_argument("--mean_response", "--mean-response", type=float)
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE")
    given = list(args)
    if "--model" not in [argument.split("=")[0] for argument in given]:
        raise UserError("posttrain plan --gpus N: name the model too, for example --model 70b or --model DIR")
    try:
        options, rest = parser.parse_known_args(given)
    except argparse.ArgumentError as error:
        raise UserError(f"posttrain plan: {error}") from None
    for name in ("gpus", "gpus_per_machine", "gpu_gb", "mean_response"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} {value:g}: give a number above 0")
    machine = options.gpus_per_machine
    if options.gpus > machine and options.gpus % machine:
        raise UserError(f"--gpus {options.gpus}: give whole machines of {machine} GPUs (--gpus_per_machine)")
    if flags := [argument for argument in rest if "=" not in argument or argument.startswith("--")]:
        raise UserError(f"posttrain plan --gpus: {flags[0]} is neither an option of it nor a setting (key=value)")
    return options, rest


def _settings(path: str, settings: Sequence[str]) -> Resolved:
    named = f"actor_rollout_ref.model.path={path}"
    explicit = load_config([named, *settings]).explicit
    usual = {key: value for key, value in USUAL.items() if key not in explicit}
    if "data.train_batch_size" in explicit:  # one update a step, as the usual one
        usual.pop("actor_rollout_ref.actor.ppo_mini_batch_size", None)
    resolved = load_config([named, *(f"{key}={value}" for key, value in usual.items()), *settings])
    resolved.explicit -= set(usual)
    config: Any = resolved.config
    if "actor_rollout_ref.actor.ppo_mini_batch_size" not in explicit:
        config.actor_rollout_ref.actor.ppo_mini_batch_size = config.data.train_batch_size
    if BUDGET not in explicit:  # a sequence is never cut
        longest = config.data.max_prompt_length + config.data.max_response_length
        config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = max(16384, longest)
    return resolved


def work_of(config: PPOConfig, mean_response: float | None = None) -> Work:
    """What one step of this configuration computes."""
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if mean_response is not None and mean_response > data.max_response_length:
        most = data.max_response_length
        raise UserError(f"--mean_response {mean_response:g}: responses end at data.max_response_length={most}")
    critic = get_adv_estimator(config.algorithm.adv_estimator).needs_critic
    several = actor.ppo_mini_batch_size < data.train_batch_size or config.trainer.max_staleness > 0
    return Work(
        prompts=data.train_batch_size,
        n=rollout.n,
        mini=min(actor.ppo_mini_batch_size, data.train_batch_size),
        prompt=data.max_prompt_length,
        response=mean_response or data.max_response_length,
        longest=data.max_response_length,
        budget=actor.ppo_max_token_len_per_gpu,
        slots=rollout.max_num_seqs,
        scoring=int(several) + int(needs_reference(config)) + int(critic),
        trained=1 + int(critic),
        texts=not config.reward_model.enable,
        gloo=rollout.weight_sync == "gloo",
        merged=config.actor_rollout_ref.model.quantization is not None,
    )


def _head(options: argparse.Namespace, model: ModelCosts, work: Work, device: Device) -> list[str]:
    size = f"{model.weights / 1e9:.1f}B weights"
    if model.experts:
        size += f", {model.active / 1e9:.1f}B of them for each token"
    mean = f" (mean {work.response:g})" if work.response < work.longest else ""
    updates = math.ceil(work.prompts / work.mini)
    return [
        f"{options.model} ({size}) on {options.gpus} GPUs, {options.gpus_per_machine} to a machine, "
        f"each {device.words}.",
        f"A step: {work.prompts} prompts x {work.n} responses of {work.longest} tokens{mean} after {work.prompt}; "
        f"{updates} update(s), {work.scoring} pass(es) for log-probs or values.",
    ]


def _body(found: Found, options: argparse.Namespace, device: Device) -> list[str]:
    chosen = found.chosen
    if chosen is None:
        return ["No layout fits.", *_why_not(found, None), ""]
    lines = [f"Proposed: {chosen.layout.words()}", *_as_settings(chosen, options.gpus_per_machine), ""]
    lines += [*_memory(chosen, device), "", *_time(chosen.costs), "", *_links(chosen.costs), ""]
    lines += [_saturation(chosen.costs), ""]
    for kind, tried in found.best.items():
        if tried is not chosen:
            stale = " (its samples are one policy version old)" if kind == AHEAD else ""
            lines.append(f"Also fits, {tried.costs.seconds:.1f} s a step: {tried.layout.words()}{stale}")
    return [*lines, *_why_not(found, chosen), ""]


def _as_settings(tried: Tried, machine: int) -> list[str]:
    rollout = tried.config.actor_rollout_ref.rollout if tried.config else None
    chosen = settings_of(tried.layout, machine)
    if rollout and rollout.kv_cache_gb is not None:
        chosen["actor_rollout_ref.rollout.kv_cache_gb"] = rollout.kv_cache_gb
    if rollout and rollout.gpu_memory_utilization is not None:
        chosen["actor_rollout_ref.rollout.gpu_memory_utilization"] = rollout.gpu_memory_utilization
    flat: dict[str, Any] = {}
    for key, value in chosen.items():
        nested = value if isinstance(value, dict) else None
        flat |= {key: value} if nested is None else {f"{key}.{name}": size for name, size in nested.items()}
    return [f"  {key}={value}" for key, value in flat.items()]


def _memory(tried: Tried, device: Device) -> list[str]:
    assert tried.plan is not None
    lines = [f"Memory of a GPU, of {shown(int(USABLE * device.bytes))} usable ({USABLE:.0%}):"]
    for stage, parts in tried.plan.stages.items():
        largest = sorted(((size, part) for part, size in parts.items() if size >= GIB / 100), reverse=True)[:4]
        named = ", ".join(f"{part} {shown(size)}" for size, part in largest)
        lines.append(f"  {stage.ljust(9)} {shown(tried.plan.peak(stage)).rjust(10)}  {named}")
    return lines


def _time(costs: StepCosts) -> list[str]:
    lines = [f"Time of a step: {costs.seconds:.1f} s"]
    return [*lines, *(f"  {stage.ljust(11)} {seconds:9.2f} s" for stage, seconds in costs.stages.items())]


def _links(costs: StepCosts) -> list[str]:
    if not costs.sent:
        return ["Nothing is sent between GPUs."]
    lines = ["Bytes that a GPU sends in a step, and those of the driver:"]
    width = max(len(what) for what, _ in costs.sent)
    return [
        *lines,
        *(f"  {w.ljust(width)}  {link.ljust(7)}  {size / 1e9:10.3f} GB" for (w, link), size in costs.sent.items()),
    ]


def _saturation(costs: StepCosts) -> str:
    shares = [f"{name} {share:.0%}" for name, share in costs.saturation()]
    return f"Saturates first: {shares[0]} of a step at full rate; then {', '.join(shares[1:])}."


def _why_not(found: Found, chosen: Tried | None) -> list[str]:
    lines = [f"{', '.join(named)}: {why}" for why, named in found.notes.items()]
    seen: set[tuple[Any, ...]] = set()
    for tried in found.rejected:
        layout = tried.layout
        # One of each kind: others differ in what does not decide whether it fits.
        kind = (layout.strategy, layout.tensor, layout.pipeline, layout.generating > 0, layout.rollout_tensor)
        if kind not in seen and len(seen) < REJECTED:
            seen.add(kind)
            lines.append(f"{layout.words()}: {tried.problem}")
    faster = "could be faster and do" if chosen else "do"
    return [f"These {faster} not fit, or cannot be used:", *(f"  {line}" for line in lines)] if lines else []


def _constants(constants: Constants) -> list[str]:
    note = "Computed from these constants (--assume name=value replaces one). Nothing between GPUs was measured:"
    return [note, *constants.lines()]
