"""`posttrain plan --gpus N --model NAME`: a layout for many GPUs, its memory, traffic and time, as text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config import ConfigError, PPOConfig, Resolved, load_config, needs_reference
from posttrain.config.schema import lookup
from posttrain.config.trainer import ROLES, ROLLOUT_WORKERS, SEQUENCE_SIZES, SHARD_SIZES, own_workers_of
from posttrain.config.trees import PPO
from posttrain.errors import UserError, first_line
from posttrain.planning.budgets import planner_for
from posttrain.planning.fleet.costs import Pricing, StepCosts, Work
from posttrain.planning.fleet.inputs import Constants, ModelCosts, model_path, parse_assumed
from posttrain.planning.fleet.search import AHEAD, EACH, ENGINE, NODES, ONE_STEP_OFF, Found, Search, Tried
from posttrain.planning.memory_plan import GIB, USABLE, Device, Planner, shown
from posttrain.rollout.engine_kwargs import OUTSIDE
from posttrain.tracking.console import print_text

H200_GIB = 139.8
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
BATCH, MINI = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
MODEL, DTYPE = (f"actor_rollout_ref.model.{name}" for name in ("path", "dtype"))
# A step as large runs have them; settings that you give replace these.
USUAL = {
    "algorithm.adv_estimator": "grpo",
    BATCH: 512,
    "actor_rollout_ref.rollout.n": 16,
    MINI: 512,
    **dict(zip(LENGTHS, (1024, 8192), strict=True)),
    DTYPE: "bfloat16",
}
LORA_RANK = "actor_rollout_ref.model.lora_rank"
DOUBLINGS = 3  # of the GPUs are tried where too few were given
REJECTED = 6  # layouts that did not fit are named, the fastest ones


def wants_fleet(args: Sequence[str]) -> bool:
    return any(argument.split("=")[0] == "--gpus" for argument in args)


# Raises for a run that would be rejected.
Check = Callable[[Resolved, Device, Planner], None]


def main(args: Sequence[str], check: Check) -> int:
    """Print the plan; the exit status is 1 if no layout fits."""
    options, settings = _options(args)
    constants = Constants.given(parse_assumed(options.assume))
    with model_path(options.model) as path:
        words = f"a GPU of {options.gpu_gb:g} GiB" if options.gpu_gb else f"an H200 ({H200_GIB:g} GiB)"
        device = Device("cuda", int((options.gpu_gb or H200_GIB) * GIB), words, hopper=not options.gpu_gb)
        search = _search(options, StepSettings(path, settings, options), device, constants, check)
        found, pricing = search.run(options.gpus), search.pricing
        if chosen := found.chosen:
            constants.used.clear()  # the constants of this layout are printed, not those of all that were tried
            pricing.of(chosen.layout)
            body = _body(found, chosen, device)
        else:
            adapters = StepSettings(path, [f"{LORA_RANK}=32", *settings], options)  # unless a rank is given
            instead = _search(options, adapters, device, constants, check)
            body = ["No layout fits.", *_what_would(search, instead, options), *_why_not(found, None), ""]
    head = _head(options, pricing.model, pricing.work, device)
    print_text("\n".join([*head, "", *body, *_constants(constants)]))
    return 0 if found.chosen else 1


class StepSettings:
    """The settings that the user gave, and those of a usual step and its workers where none were given."""

    def __init__(self, path: str, settings: Sequence[str], options: argparse.Namespace) -> None:
        self.given = [f"{MODEL}={path}", *settings]
        written = {PPO.canonical(text.partition("=")[0].lstrip("+")).key for text in settings}
        if MODEL in written:
            raise UserError(f"{MODEL}: --model names the model of a plan for many GPUs; remove the setting")
        # Sizes that must divide the workers are checked as for a run on all of these GPUs.
        each = min(options.gpus, options.gpus_per_machine)
        self.usual: dict[str, Any] = {NODES: options.gpus // each, EACH: each}
        if written & {ONE_STEP_OFF, "trainer.max_staleness"}:
            self.usual[ROLLOUT_WORKERS] = max(1, options.gpus // 2)  # a run rejects that without such workers
        first = self.load()
        # A preset is the user's choice too.
        taken = {key for key, source in first.sources.items() if not source.startswith("default")}
        values = {key: first.value(key) if key in taken else value for key, value in USUAL.items()}
        if BATCH in taken and MINI not in taken:
            values[MINI] = values[BATCH]  # one update a step, as the usual one
        values[BUDGET] = max(16384, sum(values[key] for key in LENGTHS))  # a sequence is never cut
        self.usual |= {key: value for key, value in values.items() if key not in taken}

    def load(self, chosen: Mapping[str, Any] | None = None) -> Resolved:
        """With the settings that a layout has chosen."""
        usual = [(f"{key}={value}", "default of posttrain plan --gpus") for key, value in self.usual.items()]
        return load_config([*self.given, *(f"{key}={value}" for key, value in (chosen or {}).items())], labelled=usual)


def _search(
    options: argparse.Namespace, step: StepSettings, device: Device, constants: Constants, check: Check
) -> Search:
    resolved = step.load()
    config, planner = resolved.config, planner_for(resolved.config)
    _check_planned(config)
    model = planner.count(config, device, "actor", ModelCosts.of)
    pricing = Pricing(model, work_of(config, options.mean_response), constants, options.gpus_per_machine)

    def why_rejected(chosen: Mapping[str, Any]) -> str:
        try:
            check(step.load(_flat(chosen)), device, planner)
        except ConfigError as error:
            return error.problems[0].what
        except UserError as error:
            return first_line(error)
        return ""

    return Search(config, resolved.explicit, planner, device, pricing, why_rejected)


def _check_planned(config: PPOConfig) -> None:
    """Rejects settings whose time or memory is not planned."""
    engine = config.actor_rollout_ref.rollout.name
    if engine not in ("native", *OUTSIDE):
        known = ", ".join(("native", *OUTSIDE))
        raise UserError(f"{ENGINE}={engine} is not planned over many GPUs: its speed was not measured; set {known}")
    if (dtype := config.actor_rollout_ref.model.dtype) in ("float32", "float64"):
        raise UserError(f"{DTYPE}={dtype} is not planned over many GPUs: rates are those of bfloat16; remove it")
    for role, workers in own_workers_of(config).items():
        if (key := ROLES[role].key) != ROLLOUT_WORKERS:
            raise UserError(
                f"{key}={workers} is not planned over many GPUs: all roles are on those that train; remove it"
            )
    for key in (*SHARD_SIZES, *SEQUENCE_SIZES):
        if (size := lookup(config, key)) != (whole := -1 if key in SHARD_SIZES else 1):
            raise UserError(f"{key}={size} is not planned over many GPUs; remove it, or set {key}={whole}")


def _what_would(search: Search, with_lora: Search, options: argparse.Namespace) -> list[str]:
    """What was tried instead, and fits."""
    lines, gpus, machine = [], options.gpus, options.gpus_per_machine
    if chosen := with_lora.run(gpus).chosen:
        lines.append(f"  {LORA_RANK}=32: {chosen.layout.words()}, {chosen.costs.seconds:.1f} s a step")
    for _ in range(DOUBLINGS):
        gpus = gpus * 2 if gpus * 2 <= machine else math.ceil(gpus * 2 / machine) * machine
        if chosen := search.run(gpus).chosen:
            lines.append(f"  --gpus {gpus}: {chosen.layout.words()}, {chosen.costs.seconds:.1f} s a step")
            break
    return ["These fit:", *lines] if lines else [f"No layout of {gpus} GPUs fits either."]


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


def work_of(config: PPOConfig, mean_response: float | None = None) -> Work:
    """What one step of this configuration computes."""
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if mean_response is not None and mean_response > data.max_response_length:
        most = data.max_response_length
        raise UserError(f"--mean_response {mean_response:g}: responses end at data.max_response_length={most}")
    estimator = get_adv_estimator(config.algorithm.adv_estimator)
    critic = estimator.needs_critic
    work = Work(
        prompts=data.train_batch_size,
        n=rollout.n,
        mini=min(actor.ppo_mini_batch_size, data.train_batch_size),
        prompt=data.max_prompt_length,
        response=mean_response or data.max_response_length,
        longest=data.max_response_length,
        budget=actor.ppo_max_token_len_per_gpu,
        slots=rollout.max_num_seqs,
        scoring=int(needs_reference(config)) + int(critic),
        trained=1 + int(critic),
        texts=not config.reward_model.enable,
        gloo=rollout.weight_sync == "gloo",
        merged=config.actor_rollout_ref.model.quantization is not None,
        epochs=actor.ppo_epochs,
        micro=actor.ppo_micro_batch_size_per_gpu or 0,
        greedy=int(estimator.needs_greedy_baseline),
    )
    return replace(work, scoring=work.scoring + _computes_old_log_probs(config, work.updates))


def _computes_old_log_probs(config: PPOConfig, updates: int) -> bool:
    """Whether the trainer computes them, where its own differ from those of the rollout."""
    source, algorithm = config.actor_rollout_ref.actor.old_log_probs, config.algorithm
    needed = updates > 1 or config.trainer.max_staleness > 0 or algorithm.use_kl_in_reward
    return source == "trainer" or (source == "auto" and (needed or algorithm.filter_groups.enable))


def _head(options: argparse.Namespace, model: ModelCosts, work: Work, device: Device) -> list[str]:
    size = f"{model.weights / 1e9:.1f}B weights"
    if model.experts:
        size += f", {model.active / 1e9:.1f}B of them for each token"
    mean = f" (mean {work.response:g})" if work.response < work.longest else ""
    gpus = f"{options.gpus} GPUs, {options.gpus_per_machine} to a machine, each" if options.gpus > 1 else "one GPU,"
    return [
        f"{options.model} ({size}) on {gpus} {device.words}.",
        f"A step: {work.prompts} prompts x {work.n} responses of {work.longest} tokens{mean} after {work.prompt}; "
        f"{work.updates} update(s), {work.scoring} pass(es) for log-probs or values.",
    ]


def _body(found: Found, chosen: Tried, device: Device) -> list[str]:
    settings = [f"  {key}={value}" for key, value in _flat(chosen.settings).items()]
    lines = [f"Proposed: {chosen.layout.words()}", *settings, ""]
    lines += [*_memory(chosen, device), "", *_time(chosen.costs), "", *_links(chosen.costs), ""]
    lines += [_saturation(chosen.costs), ""]
    for kind, tried in found.best.items():
        if tried is not chosen:
            stale = " (its samples are one policy version old)" if kind == AHEAD else ""
            lines.append(f"Also fits, {tried.costs.seconds:.1f} s a step: {tried.layout.words()}{stale}")
    return [*lines, *_why_not(found, chosen), ""]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a dict as settings of their own."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{name}": size for name, size in value.items()} if isinstance(value, dict) else {key: value}
    return flat


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
    return [note, *constants.lines()] if constants.used else []
