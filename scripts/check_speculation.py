#!/usr/bin/env python3
"""Tokens that differ with actor_rollout_ref.rollout.speculation, and the time that it saves or costs.

    python scripts/check_speculation.py same --tokens 1000000           # with trainer.exact: no token may differ
    python scripts/check_speculation.py rounding --tokens 100000        # without: beside another batch size
    python scripts/check_speculation.py tail                            # seconds of the tail of long-tailed batches
    python scripts/check_speculation.py tail --device cuda --model FOLDER  # ... of what a chat model writes
    python scripts/check_speculation.py costs --device cuda --shape 0.5b

On a CPU the model is the embedded one. `same`, `rounding` and `tail` train it on worked sums that it repeats and checks
a few times or many; `tail` also decodes with random weights, whose text has no pattern. `costs` compares passes with
drafts, right ones and wrong ones, with plain decoding. The exit status of `same` is 1 if a token or log-prob differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.bench import bench_folder
from posttrain.bench.workload import PRESETS, draw, find_shape
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.decodable import why_not_exact
from posttrain.models.embedded import build_model, byte_tokenizer
from posttrain.models.loading import DTYPES, fuse_and_prove, load_causal_lm
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native
from posttrain.rollout.native.engine import NativeEngine
from posttrain.rollout.native.speculation import WIDEST, PassCost, Speculation
from posttrain.trainer.embedded import fit_pairs

ALWAYS = PassCost(
    tile=10**6, block=1, token=-0.9, host=-0.5
)  # drafts are verified from the first token on, whether that pays or not
MOST = 460  # tokens of a response
GROUP = 8


class Always(PassCost):
    """Drafts are verified from the first token on, whether that pays or not."""

    def best_width(self, rows: int, share: float, gain: float) -> int:
        return WIDEST


def worked_sum(rng: random.Random) -> tuple[str, str]:
    """A prompt and its response: a sum and its check, repeated once or, rarely, up to 24 times."""
    a, b = rng.randrange(10, 50), rng.randrange(10, 50)
    times = 1 + min(24, int(rng.paretovariate(1.0)))
    return f"{a}+{b}?\n", f"{a}+{b}={a + b}; {a + b}-{b}={a}.\n" * times


def make_model(tokenizer: Any, steps: int) -> Any:
    """The embedded model after so many steps on worked sums."""
    folder = bench_folder() / "models" / f"worked-sums-{steps}"
    if (folder / "config.json").is_file():
        return fuse_and_prove(AutoModelForCausalLM.from_pretrained(folder).eval(), "the embedded model")
    model = fuse_and_prove(build_model(tokenizer, seed=0).eval(), "the embedded model")
    if not steps:
        return model
    rng, pairs = random.Random(0), []
    while len(pairs) < 32 * steps:
        prompt, response = worked_sum(rng)
        pairs.append((tokenizer.encode(prompt), [*tokenizer.encode(response), tokenizer.eos_token_id][:320]))
    optim = OptimConfig(lr=3e-3, betas=[0.9, 0.95], lr_warmup_steps=20)
    settings = EngineSettings(device=torch.device("cpu"), optim=optim, total_steps=steps, token_budget=8192)
    engine, pad = TorchEngine(model, settings), tokenizer.pad_token_id
    loss = fit_pairs(engine, pairs, steps=steps, batch_size=32, pad_token_id=pad, seed=0)
    print(f"trained {steps} steps, loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    return model


def make_engine(
    module: Any, speculation: str, *, exact: bool, always: bool = False, rows: int = 64, gigabytes: float = 0.5
) -> tuple[NativeEngine, Speculation]:
    """An engine, and what `engine.speculation` is set to for drafts, or None for plain decoding."""
    config = RolloutConfig(kv_cache_gb=gigabytes, max_num_seqs=rows, speculation=speculation)
    engine = build_native(module, config, decode=None, exact=exact)[0]
    assert engine.speculation is not None
    if always:
        engine.speculation.cost = Always(8, 1, 1, 1)
    return engine, engine.speculation


def draw_round(tokenizer: Any, number: int, rows: int) -> tuple[list[list[int]], list[Sampling], list[int]]:
    """Groups of prompts, with sampling settings that differ between groups."""
    rng = random.Random(number)
    prompts = [tokenizer.encode(worked_sum(rng)[0]) for _ in range(rows // GROUP)]
    ends = (tokenizer.eos_token_id,)
    kinds = [
        Sampling(max_tokens=MOST, stop_token_ids=ends),
        Sampling(max_tokens=MOST, temperature=0.7, stop_token_ids=ends),
        Sampling(max_tokens=MOST, temperature=1.2),
        Sampling(max_tokens=MOST // 16, top_k=5, top_p=0.9),
    ]
    samplings = [kinds[(number + at // GROUP) % len(kinds)] for at in range(rows)]
    return [prompts[at // GROUP] for at in range(rows)], samplings, [1000 * number + at for at in range(rows)]


def compare(one: list[Output], other: list[Output]) -> dict[str, int]:
    """Tokens up to the first that differs, how many responses have one, and how many log-probs before it differ."""
    found = {"tokens": 0, "responses": len(one), "responses that differ": 0, "log-probs that differ": 0}
    for a, b in zip(one, other, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        same = next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
        found["tokens"] += same
        found["responses that differ"] += a.token_ids != b.token_ids
        pair = (np.asarray(x.log_probs, np.float32)[:same] for x in (a, b))
        found["log-probs that differ"] += int((next(pair) != next(pair)).sum())
    return found


def check_same(options: argparse.Namespace, *, exact: bool) -> int:
    tokenizer = byte_tokenizer()
    module = make_model(tokenizer, options.steps)
    engine, learnt = make_engine(module, "epochs", exact=exact, always=True)
    sides: dict[str, tuple[Speculation | None, int]] = {"speculation": (learnt, 64)}
    if not exact:
        sides["batch size"] = None, 4
    totals: dict[str, dict[str, int]] = {name: {} for name in sides}
    counts: dict[str, float] = {}
    number = 0
    while sum(each.get("tokens", 0) for each in totals.values()) < options.tokens * len(sides):
        given = draw_round(tokenizer, number // 2, 32)  # twice each: the second time drafts are mostly right
        engine.speculation, engine.slots.most = None, 64
        wanted = generate(engine, *given)
        for name, (engine.speculation, engine.slots.most) in sides.items():
            for key, value in compare(generate(engine, *given), wanted).items():
                totals[name][key] = totals[name].get(key, 0) + value
        for key, value in learnt.take_counts().items():
            counts[key] = counts.get(key, 0) + value
        number += 1
        if number % 10 == 0:
            print(f"round {number}: {totals}", flush=True)
    print(json.dumps({"exact": exact, "differ": totals, "speculation": counts}))
    return int(exact and any(each["responses that differ"] + each["log-probs that differ"] for each in totals.values()))


def tail_seconds(engine: NativeEngine, given: Any, few: int) -> tuple[list[Output], float, float]:
    """Seconds of a batch, and of its tail: from the step at which at most `few` responses are left."""
    for row, (prompt, sampling, seed) in enumerate(zip(*given, strict=True)):
        engine.submit(Request(row, prompt, sampling, seed))
    # On a CPU the seconds that it computed, so that other programs do not count; with one thread that is the time.
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    outputs, started, tail = [], clock(), None
    while engine.has_work():
        outputs += engine.step()
        if tail is None and len(outputs) >= len(given[0]) - few:
            tail = clock()
    ended = clock()
    engine.sleep()
    engine.wake()
    return sorted(outputs, key=lambda output: output.id), ended - started, ended - (tail or started)


def sums_batch(tokenizer: Any, number: int, *, ends: bool) -> Any:
    """A batch of the embedded model. Four responses never end; the others end by themselves, or after 24 tokens."""
    rng = random.Random(number)
    prompts = [tokenizer.encode(worked_sum(rng)[0]) for _ in range(8)]
    rows = [prompts[at // GROUP] for at in range(64)]
    short = Sampling(max_tokens=MOST if ends else 24, stop_token_ids=(tokenizer.eos_token_id,))
    samplings = [short if at % 16 else Sampling(max_tokens=MOST) for at in range(64)]
    return rows, samplings, [1000 * number + at for at in range(64)]


def questions_batch(tokenizer: Any, number: int, responses: int, longest: int) -> Any:
    """Word problems for a chat model, `GROUP` responses to each; they end by themselves, or at `longest` tokens."""
    rng, prompts = random.Random(number), []
    for _ in range(responses // GROUP):
        a, b, c = (rng.randrange(3, 60) for _ in range(3))
        question = rng.choice(QUESTIONS).format(a=a, b=b, c=c)
        text = [{"role": "user", "content": f"{question} Think step by step, and check your answer."}]
        prompts.append(list(tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)))
    sampling = Sampling(max_tokens=longest, stop_token_ids=(tokenizer.eos_token_id,))
    rows = [prompts[at // GROUP] for at in range(responses)]
    return rows, [sampling] * responses, [10_000 * number + at for at in range(responses)]


QUESTIONS = (
    "A shop sells {a} boxes a day, each with {b} pencils. How many pencils does it sell in {c} days?",
    "Tom has {a} marbles. He wins {b} and loses {c}. How many has he now?",
    "A train drives {a} km in the first hour, {b} km in the second and {c} km in the third. How far does it come?",
    "Write a list of the multiples of {a} up to {b} times {a}, with a sentence about each.",
)


def check_tail(options: argparse.Namespace) -> None:
    if options.model:
        tokenizer, device = AutoTokenizer.from_pretrained(options.model), torch.device(options.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        module = load_causal_lm(ModelConfig(path=options.model), dtype=dtype, device=device).eval()
        for exact in (True, False) if why_not_exact(module) is None else (False,):
            name = f"{options.responses} responses, {'exact' if exact else 'not exact'}"
            engine, learnt = make_engine(module, "batch", exact=exact, rows=options.responses, gigabytes=16)
            batches = lambda n: questions_batch(tokenizer, n, options.responses, options.length)  # noqa: E731
            measure_tail(options, name, engine, learnt, batches, same=exact)
        return
    tokenizer = byte_tokenizer()
    for name, steps in {"trained": options.steps, "random": 0}.items():
        engine, learnt = make_engine(make_model(tokenizer, steps), "batch", exact=True)
        measure_tail(
            options, name, engine, learnt, lambda n, ends=steps > 0: sums_batch(tokenizer, n, ends=ends), same=True
        )


def measure_tail(
    options: argparse.Namespace,
    name: str,
    engine: NativeEngine,
    learnt: Speculation,
    batch: Callable[[int], Any],
    *,
    same: bool,
) -> None:
    sides: dict[str, Speculation | None] = {"plain": None, "drafts": learnt}
    seconds: list[tuple[float, ...]] = []
    counts: dict[str, float] = {}
    for number in range(-1, options.rounds):  # the first warms up: kernels are compiled, steps captured
        given, made = batch(number), {}
        for key in ("plain", "drafts") if number % 2 else ("drafts", "plain"):
            engine.speculation = sides[key]
            made[key] = tail_seconds(engine, given, options.few)
        if same:
            assert [x.token_ids for x in made["plain"][0]] == [x.token_ids for x in made["drafts"][0]]
        found = learnt.take_counts()
        learnt.forget()
        if number < 0:
            continue
        lengths = sorted(len(output.token_ids) for output in made["plain"][0])
        seconds.append((*made["plain"][1:], *made["drafts"][1:], lengths[len(lengths) // 2], lengths[-1]))
        for key, value in found.items():
            counts[key] = counts.get(key, 0) + value
    plain, plain_tail, drafts, drafts_tail, median, longest = (
        statistics.median(column) for column in zip(*seconds, strict=True)
    )
    times = {"batch": round(plain / drafts, 3), "tail": round(plain_tail / drafts_tail, 3)}
    took = {"plain": [round(plain, 3), round(plain_tail, 3)], "drafts": [round(drafts, 3), round(drafts_tail, 3)]}
    facts = {"seconds of batch and tail": took, "tokens of a response": [median, longest]}
    print(json.dumps({"text": name, "times faster": times, **facts, "counts": counts}), flush=True)


def check_costs(options: argparse.Namespace) -> None:
    """Seconds a token of plain decoding, of right drafts, and of drafts that are never sampled, by rows."""
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else DTYPES[PRESETS[options.shape].dtype]
    module = draw(find_shape(options.shape).folder, dtype, device).eval()
    module = fuse_and_prove(module, options.shape)
    size, length = module.config.vocab_size, options.length
    generator = torch.Generator().manual_seed(0)

    def seconds(speculation: Speculation | None, rows: int) -> tuple[float, list[Output]]:
        engine.speculation = speculation
        prompts = torch.randint(0, size, (rows, 64), generator=generator.manual_seed(rows)).tolist()
        if device.type == "cuda":
            torch.cuda.synchronize()
        # On a CPU the seconds that it computed, so that other programs do not count; with one thread that is the time.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        started = clock()
        outputs = generate(engine, prompts, [Sampling(max_tokens=length)] * rows, range(rows))
        taken = clock() - started
        learnt.forget()
        return taken, outputs

    for exact in (False, True) if options.exact else (False,):
        engine, learnt = make_engine(module, "epochs", exact=exact, always=True)
        for rows in map(int, options.rows.split(",")):
            seconds(None, rows)
            base, wanted = min((seconds(None, rows) for _ in range(2)), key=lambda made: made[0])
            seconds(learnt, rows)
            learnt.take_counts()
            right, found = min((seconds(learnt, rows) for _ in range(2)), key=lambda made: made[0])
            counts = learnt.take_counts()
            passes = counts["passes"] / 2 / rows
            print(
                json.dumps(
                    {
                        "shape": options.shape, "exact": exact, "rows": rows,
                        "plain_ms_per_step": round(base / length * 1e3, 3),
                        "ms_per_pass": round(right / passes * 1e3, 3),
                        "tokens_per_pass": round(counts["verified"] / counts["passes"], 1),
                        "times_faster": round(base / right, 2), **compare(found, wanted),
                    }
                ),
                flush=True,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("same", "rounding", "tail", "costs"))
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens to compare (same, rounding)")
    parser.add_argument("--steps", type=int, default=150, help="training steps of the embedded model")
    parser.add_argument("--rounds", type=int, default=5, help="batches of which the median is taken (tail)")
    parser.add_argument("--few", type=int, default=4, help="responses that are left when the tail begins (tail)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="the folder of a chat model (tail)")
    parser.add_argument("--responses", type=int, default=512, help="of a batch of that model (tail)")
    parser.add_argument("--shape", default="1m", help="a preset of posttrain bench (costs)")
    parser.add_argument("--rows", default="1,8,64", help="responses side by side (costs)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a response (costs, tail with --model)")
    parser.add_argument("--exact", action="store_true", help="also with trainer.exact (costs)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what in ("same", "rounding"):
        return check_same(options, exact=options.what == "same")
    (check_tail if options.what == "tail" else check_costs)(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
