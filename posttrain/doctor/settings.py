"""Settings that run but are probably mistakes: extreme learning rates, sampling without variety, idle settings.

Settings that cannot run are rejected when the configuration is read (`config/check.py`, `config/environment.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms import get_adv_estimator
from posttrain.config.checked import idle_settings
from posttrain.config.environment import missing_notes
from posttrain.doctor.case import ERROR, NOTE, WARNING, Case, Finding
from posttrain.models.adapter_targets import adapters_share, describe_adapted, large_note
from posttrain.planning.supervised import ROLE
from posttrain.workers.weight_transport import check_transport

AREA = "configuration"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Rates:
    """Learning rates above which runs are known to diverge; small models tolerate more."""

    above: int  # for models with at least so many parameters
    rl: float
    supervised: float


HIGHEST = (Rates(100_000_000, 5e-5, 5e-4), Rates(10_000_000, 5e-4, 3e-3), Rates(0, 5e-3, 2e-2))
LORA_BEARS = 20.0  # adapters tolerate rates that are higher by up to this factor
# Adapters hardly move at these rates, which are those for training all weights, and a little more.
LORA_RL, LORA_SUPERVISED = 2e-6, 5e-6
LOWEST = 1e-9  # below this bfloat16 and float32 weights do not change in a run's time
_WITH_HEAD = ("CausalLM", "LMHead", "ConditionalGeneration")
HEAVY_KL = 1.0  # with a coefficient above this the KL term outweighs any reward
FEWEST_CHOICES = 2
COLDEST = 0.2  # temperature up to which most responses to a prompt are alike
HOTTEST = 2.0  # temperature from which text falls apart


def check_settings(case: Case) -> Iterator[Finding]:
    """What can be checked without data."""
    idle = list(idle_settings(case.resolved.config, case.resolved.explicit))
    for sentence in idle:
        yield Finding(WARNING, AREA, sentence, "", "leave the setting out, or change what makes it idle")
    elsewhere = {*idle, *missing_notes(case.resolved)}  # a missing logger is a warning of the resources
    for sentence in case.resolved.notes:
        if sentence not in elsewhere:
            yield Finding(NOTE, AREA, sentence)
    yield from _architecture(case)
    yield from _learning_rate(case)
    yield from _expert_adapters(case)
    yield from _positions(case)
    if case.is_rl:
        yield from _sampling(case)
        yield from _kl(case)
        check_transport(case.config)


def _architecture(case: Case) -> Iterator[Finding]:
    # An encoder, or a decoder that was saved without its head.
    named = getattr(case.model_config, "architectures", None) or []
    if case.is_pairs or not named or any(part in name for name in named for part in _WITH_HEAD):
        return
    what = (
        f"{case.model.path} holds {', '.join(named)} ({case.model_config.model_type}), which is no language model with "
    )
    what += "a head for the next token (config.json, `architectures`)."
    yield Finding(ERROR, AREA, what, case.where(f"{case.tree.model}.path"), "give a model that generates text")


def _learning_rate(case: Case) -> Iterator[Finding]:
    key, optim = case.optim
    row = next(row for row in HIGHEST if case.parameters >= row.above)
    lora = LORA_BEARS if case.model.lora_rank > 0 else 1.0
    highest = (row.rl if case.is_rl else row.supervised) * lora
    size = f"a model of {case.parameters / 1e6:,.3g} million parameters" + " with adapters" * (lora > 1)
    if optim.lr > highest:
        what = f"`{key}.lr={optim.lr:g}` is above {highest:g}, where training of {size} usually falls apart."
        do = f"try {highest / 10:g} first ({'1e-6' if case.is_rl else '1e-5'} is usual for billions of parameters)"
        yield Finding(WARNING, AREA, what, case.where(f"{key}.lr"), do)
    if optim.lr < LOWEST:
        what = f"`{key}.lr={optim.lr:g}`: the weights would hardly change in any number of steps."
        yield Finding(WARNING, AREA, what, case.where(f"{key}.lr"), f"set {key}.lr between 1e-7 and {highest:g}")
    elif case.model.lora_rank > 0 and optim.lr <= (LORA_RL if case.is_rl else LORA_SUPERVISED):
        what = (
            f"`{key}.lr={optim.lr:g}` is a rate for training all weights. LoRA trains few, which start with no effect "
        )
        what += "on the model, so that it would hardly change."
        do = f"set {key}.lr between 1e-5 and 1e-4" if case.is_rl else f"set {key}.lr to about 1e-4"
        yield Finding(WARNING, AREA, what, case.where(f"{key}.lr"), do)


def _expert_adapters(case: Case) -> Iterator[Finding]:
    if case.model.lora_rank == 0:
        return
    role, key = "actor" if case.is_rl else ROLE, f"{case.tree.model}.lora_rank"
    words, share = case.planner.count(case.config, case.device, role, _experts_of)
    if words is not None:
        case.report.fact(AREA, f"{words}.")
    if large := large_note(share, key):
        do = f"lower {key}, or leave the experts out of {case.tree.model}.target_modules"
        yield Finding(WARNING, AREA, large, case.where(key), do)


def _experts_of(model: Any) -> tuple[str | None, float]:
    return describe_adapted(model), adapters_share(model)


def _positions(case: Case) -> Iterator[Finding]:
    limit = getattr(case.model_config.get_text_config(), "max_position_embeddings", None)
    data = case.config.data
    longest = data.max_prompt_length + data.max_response_length if case.is_rl else data.max_length
    if not limit or longest <= limit:
        return
    keys = ("data.max_prompt_length", "data.max_response_length") if case.is_rl else ("data.max_length",)
    what = f"{' + '.join(keys)} allow {longest} tokens, but the model was made for {limit} positions "
    what += "(max_position_embeddings)."
    yield Finding(WARNING, AREA, what, case.where(*keys), f"keep {' + '.join(keys)} at {limit} or below")


def _sampling(case: Case) -> Iterator[Finding]:
    rollout = case.config.actor_rollout_ref.rollout
    grouped = get_adv_estimator(case.config.algorithm.adv_estimator).compares_group
    if rollout.n > 1 and grouped and case.config.algorithm.adv_estimator:
        narrow = {
            "top_k": rollout.top_k != -1 and rollout.top_k < FEWEST_CHOICES,
            "top_p": rollout.top_p <= 0.05,
            "temperature": rollout.temperature <= 0.05,
        }
        for name, found in narrow.items():
            if found:
                key = f"{_ROLLOUT}.{name}"
                what = f"`{key}={getattr(rollout, name):g}`: the {rollout.n} responses to a prompt would be the same, "
                what += "so that no group could teach anything."
                yield Finding(WARNING, AREA, what, case.where(key), f"leave {key} out: training samples freely")
        if not narrow["temperature"] and rollout.temperature <= COLDEST:
            key = f"{_ROLLOUT}.temperature"
            what = f"`{key}={rollout.temperature:g}`: most of the {rollout.n} responses to a prompt would be alike. "
            what += "Groups with equal rewards have no signal, and little is explored."
            do = f"set {key} to 1 for training (0.7 to 1 is usual); validation has {_ROLLOUT}.val_kwargs.temperature"
            yield Finding(WARNING, AREA, what, case.where(key), do)
    if rollout.temperature > HOTTEST:
        key = f"{_ROLLOUT}.temperature"
        what = (
            f"`{key}={rollout.temperature:g}`: almost any token would be as likely as any other, and responses noise."
        )
        yield Finding(WARNING, AREA, what, case.where(key), f"set {key} to 1, at most to {HOTTEST:g}")
    val = rollout.val_kwargs
    if val.n > 1 and not val.do_sample and case.config.data.val_files is not None:
        what = f"`{_ROLLOUT}.val_kwargs.n={val.n}` without sampling: validation would give the same answer {val.n} "
        what += "times, and count it as so many."
        do = f"set {_ROLLOUT}.val_kwargs.do_sample=True, or val_kwargs.n=1"
        yield Finding(WARNING, AREA, what, case.where(f"{_ROLLOUT}.val_kwargs.n"), do)


def _kl(case: Case) -> Iterator[Finding]:
    actor, algorithm = case.config.actor_rollout_ref.actor, case.config.algorithm
    terms = {
        f"{_ACTOR}.kl_loss_coef": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        "algorithm.kl_ctrl.kl_coef": algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0,
    }
    for key, value in terms.items():
        if value > HEAVY_KL:
            what = f"`{key}={value:g}`: the KL term would outweigh the reward, and the policy stay where it is."
            yield Finding(WARNING, AREA, what, case.where(key), f"set {key} to 0.001 to 0.1")
