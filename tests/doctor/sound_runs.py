"""Runs in which nothing is wrong: each a name and what it lays on the desk."""

from __future__ import annotations

from collections.abc import Callable

from tests.doctor.desk import Desk
from tests.doctor.mistakes import ROOM, TOOLS
from tests.doctor.spoiling import A, M, R, answered, paired

LIST_REWARD = """
def group(completions, ground_truths):
    return [{"score": float(text.strip() == truth), "short": len(text) < 4} for text, truth in
            zip(completions, ground_truths)]
"""


def settings(**pairs: object) -> Callable[[Desk], object]:
    long = {"A": A, "R": R, "M": M}

    def key(short: str) -> str:
        first, *rest = short.split("__")
        return ".".join([long.get(first, first), *rest])

    return lambda desk: desk.settings.update({key(name): value for name, value in pairs.items()})


def as_verl(desk: Desk) -> None:
    def turned(row: dict) -> dict:
        truth = {"style": "rule", "ground_truth": row["ground_truth"]}
        ask = [{"role": "system", "content": "Add."}, {"role": "user", "content": row["prompt"]}]
        return {"prompt": ask, "reward_model": truth, "data_source": "openai/gsm8k", "extra_info": {"index": 1}}

    desk.train, desk.val = [turned(row) for row in desk.train], [turned(row) for row in desk.val]
    desk.reward = None


def combined(desk: Desk) -> None:
    desk.reward = None
    desk.settings |= {
        "reward.functions.right": "{weight: 1.0}",
        "reward.functions.short": "{free_tokens: 4, max_tokens: 12, needs: right, weight: 0.1}",
        "reward.timeout_s": 5,
    }


def supervised(program: str, change: Callable[[int, dict], dict], **more: object) -> Callable[[Desk], object]:
    def lay(desk: Desk) -> None:
        desk.program, desk.reward = program, None
        desk.train = [change(i, row) for i, row in enumerate(desk.train)]
        desk.val = [change(i, row) for i, row in enumerate(desk.val)]
        settings(**more)(desk)

    return lay


def talk(i: int, row: dict) -> dict:
    turns = [(row["prompt"], row["ground_truth"]), ("Sure?", "Yes.")]
    roles = ("user", "assistant")
    said = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    return {"messages": said}


def one_prompt_for_a_tool(desk: Desk) -> None:
    """All rows ask the same; what is right is known to the tool alone, from the row."""

    def asks(row: dict) -> dict:
        given = {"where": {"create_kwargs": {"answer": row["ground_truth"], "of": row["prompt"]}}}
        return {**row, "prompt": "Ask.", "extra_info": {"tools_kwargs": given}}

    desk.train, desk.val = [asks(row) for row in desk.train], [asks(row) for row in desk.val]


GSM8K = "There were {a} and then {b} more, so there are {a} + {b} = <<{a}+{b}={c}>>{c} of them.\n#### {c}"
MATH = "Adding $a = {a}$ to $b = {b}$ gives the sum that was asked for, so the answer is $\\boxed{{{c}}}$."
PROOF = "Let us assume the contrary; then the two sides differ, which cannot be, and so they are equal by lemma {w}."
BOXED = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"boxed\\{([^}]*)\\}", solution_str)
    return float(bool(found) and found[-1] == ground_truth.split("####")[-1].strip())
"""
NOISY = """
import random

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""
JUDGED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(bool(solution_str) and solution_str.split()[-1:] == ground_truth.split()[-1:])
"""
SLEEPS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return float(solution_str.split()[-1:] == [ground_truth])
"""


def solutions(form: str, reward: str | None, *, asks: str = "", source: str | None = None) -> Callable[[Desk], object]:
    """Reference answers that are whole solutions, longer than a response may be."""

    def lay(desk: Desk) -> None:
        desk.reward = reward
        for row in (*desk.train, *desk.val):
            c = int(row["ground_truth"])
            letters = "".join(chr(ord("a") + int(digit)) for digit in str(c))
            row["ground_truth"] = form.format(a=c // 3, b=c - c // 3, c=c, w=letters)
            row["prompt"] += asks
            row["data_source"] = source or row["data_source"]

    return lay


def with_tools(desk: Desk) -> None:
    settings(**TOOLS, **ROOM)(desk)
    for row in (*desk.train, *desk.val):
        row["agent_name"] = "tool_agent"
        row["extra_info"] = {"tools_kwargs": {"calculator": {"create_kwargs": {"digits": 2}}, "search": None}}


def led(desk: Desk) -> None:
    file = desk.folder / "agents.py"
    desk.spoil.append(lambda desk: file.write_text("async def lead(chat, row):\n    await chat.say()\n"))
    desk.settings["actor_rollout_ref.rollout.agent"] = f"{file}:lead"


ALL: dict[str, Callable[[Desk], object]] = {
    "one prompt whose answer only a tool knows": one_prompt_for_a_tool,
    "grpo with its own reward": lambda desk: None,
    "ppo with a critic and KL in the reward": settings(
        algorithm__adv_estimator="gae", R__n=1, algorithm__use_kl_in_reward=True, critic__optim__lr=1e-4
    ),
    "dapo": lambda desk: [
        desk.settings.update({"algorithm": "dapo", "algorithm.adv_estimator": None}),
        settings(reward__overlong_buffer__len=4)(desk),
    ],
    "rloo with KL in the loss and a reference": settings(
        algorithm__adv_estimator="rloo", A__use_kl_loss=True, A__kl_loss_coef=0.01, A__ppo_epochs=2
    ),
    "a calculator, in two turns": with_tools,
    "an agent": led,
    "whole solutions of gsm8k, scored by their source": solutions(GSM8K, None, source="openai/gsm8k"),
    "whole solutions of gsm8k, and a reward that reads a box": solutions(GSM8K, BOXED, asks=" Answer in \\boxed{}."),
    "whole solutions of MATH, scored by their source": solutions(MATH, None, source="lighteval/MATH"),
    "proofs that a judge reads": solutions(PROOF, JUDGED),
    "adapters at the least of their rates": settings(M__lora_rank=8, A__optim__lr=3e-6),
    "all weights at their usual rate": settings(A__optim__lr=1e-6),
    "a temperature of 0.6, and a cold validation": settings(
        R__temperature=0.6, R__val_kwargs__temperature=0.1, R__val_kwargs__do_sample=True
    ),
    "mini-batches of two prompts": settings(A__ppo_mini_batch_size=2),
    "a trial of two prompts, one by one": settings(data__train_batch_size=2, A__ppo_mini_batch_size=1),
    "a reward that imports random and does not use it": lambda desk: setattr(desk, "reward", NOISY),
    "a reward of a fifth of a second, for few responses": lambda desk: setattr(desk, "reward", SLEEPS),
    "adapters at their usual rate": settings(M__lora_rank=4, A__optim__lr=1e-4, A__optim__lr_warmup_steps=1),
    "rows as verl has them, scored by their source": as_verl,
    "several rewards": combined,
    "a reward of whole groups, sampled validation": lambda desk: [
        setattr(desk, "reward", LIST_REWARD),
        settings(R__val_kwargs__n=4, R__val_kwargs__do_sample=True, trainer__test_freq=2, trainer__save_freq=2)(desk),
    ],
    "no validation, another engine": settings(data__val_files="null", R__name="hf", R__temperature=0.7),
    "sft on prompts with responses": supervised("sft", answered, optim__lr=1e-4),
    "sft on conversations": supervised("sft", talk, model__enable_gradient_checkpointing=True),
    "a reward model": supervised("reward-model", paired, trainer__max_ckpt_to_keep=2, trainer__save_freq=1),
}
