#!/usr/bin/env python3
"""Tokens whose log-probs differ between rollout and trainer with trainer.exact, and what the setting costs.

    python scripts/check_exact.py --device cpu                                # a tiny shape, in half a minute
    python scripts/check_exact.py --device cuda --shape 0.5b
    python scripts/check_exact.py --device cuda --shape 7b --prompts 32 --no-update

Weights are random, biases and norms too. A round samples groups of responses to prompts of several lengths, computes
their log-probs by the trainer (packed by its budget, in small passes, without sharing prompts, a few rows alone),
scores some of them by the rollout engine, and makes an update. Both kinds of run, with and without the setting, do the
same rounds in turn. On CUDA the parts of a layer are compared first, so that a difference can be located. The exit
status is 1 if any token differs with the setting.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.bench.workload import PRESETS, draw, find_shape
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.loading import DTYPES, fuse_and_prove
from posttrain.protocol import DataProto
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate, to_batch
from posttrain.rollout.native.build import build_native

SCORED = 8  # rows of a round that the rollout engine scores, and that the trainer computes alone
STAGES = ("rollout", "log-probs", "update")


class Side:
    """A trainer and a rollout engine over the same random weights."""

    def __init__(self, options: argparse.Namespace, *, exact: bool) -> None:
        self.options, self.device = options, torch.device(options.device)
        dtype = torch.float32 if options.device == "cpu" else DTYPES[PRESETS[options.shape].dtype]
        module = draw(find_shape(options.shape).folder, dtype, self.device).eval()
        generator = torch.Generator(self.device).manual_seed(1)
        for weight in module.parameters():
            if weight.ndim == 1:  # biases start at 0 and norms at 1, which would hide an error
                noise = torch.randn(weight.shape, generator=generator, device=self.device)
                weight.data.add_(0.3 * noise.to(dtype))
        module = fuse_and_prove(module, options.shape)
        optim = None if options.no_update else OptimConfig(lr=1e-5)
        settings = EngineSettings(self.device, optim, token_budget=options.budget, exact=exact)
        self.trainer, self.vocabulary = TorchEngine(module, settings), module.config.vocab_size
        self.rollout, self.name = build_native(
            module, RolloutConfig(kv_cache_gb=options.cache_gb), decode=None, exact=exact
        )
        self.seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.differ, self.tokens, self.largest = {}, 0, 0.0

    def round(self, number: int) -> None:
        options, generator = self.options, torch.Generator().manual_seed(number)
        lengths = torch.randint(3, options.prompt_tokens + 1, (options.prompts,), generator=generator).tolist()
        ids = [torch.randint(0, self.vocabulary, (length,), generator=generator).tolist() for length in lengths]
        prompts = [row for row in ids for _ in range(options.group)]
        # Lengths of responses differ, so that rows end and the batch of decode steps shrinks to a single row.
        budget = torch.randint(1, options.tokens + 1, (len(prompts),), generator=generator).tolist()
        sampling = [Sampling(max_tokens=most, temperature=options.temperature) for most in budget]
        seeds = [1000 * number + row for row in range(len(prompts))]
        outputs = self._timed("rollout", lambda: generate(self.rollout, prompts, sampling, seeds))
        batch = to_batch(prompts, outputs, pad_token_id=0)
        found = self._timed("log-probs", lambda: self._log_probs(batch))
        real = batch.batch["response_mask"].bool()
        gap = (found - batch.batch["rollout_log_probs"]).abs()[real]
        self.tokens, self.largest = self.tokens + gap.numel(), max(self.largest, float(gap.max()))
        self._count("rollout and trainer", gap)
        self._compare_ways(batch, found, real)
        rows = [[*prompts[row], *outputs[row].token_ids] for row in range(SCORED)]
        for row, scores in enumerate(self.rollout.score(rows, temperature=options.temperature)):
            mine = scores[len(prompts[row]) - 1 :]
            self._count("decoding and prefill", mine - torch.as_tensor(outputs[row].log_probs))
        if not options.no_update:
            self._timed("update", lambda: self._update(batch))
            self.rollout.load_weights(self.trainer.export_weights(), number + 1)

    def _log_probs(self, batch: DataProto) -> torch.Tensor:
        return self.trainer.log_probs(batch, temperature=self.options.temperature)["log_probs"]

    def _compare_ways(self, batch: DataProto, found: torch.Tensor, real: torch.Tensor) -> None:
        """The trainer against itself: other packings of the same rows."""
        runner, facts = self.trainer.runner, self.trainer.facts()
        for name, changes in {"small passes": {"token_budget": 700}, "no sharing": {"shares_prompts": False}}.items():
            runner.facts = replace(facts, **changes)
            self._count(name, (self._log_probs(batch) - found)[real])
        runner.facts = facts
        few = batch[:SCORED]
        width = few.batch["response_mask"].shape[1]
        self._count("few rows", (self._log_probs(few) - found[:SCORED, :width])[real[:SCORED]])

    def _update(self, batch: DataProto) -> None:
        def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
            gap = outputs["log_probs"].detach() - micro.batch["rollout_log_probs"]
            self._count("rollout and update", gap[micro.batch["response_mask"].bool()])
            return (outputs["log_probs"] * micro.batch["response_mask"]).mean()

        self.trainer.update(batch, loss, temperature=self.options.temperature)

    def _count(self, name: str, gap: torch.Tensor) -> None:
        self.differ[name] = self.differ.get(name, 0) + int((gap != 0).sum())

    def _timed(self, stage: str, call: Callable[[], Any]) -> Any:
        # On a CPU the seconds that it computed, so that other programs do not count; with one thread that is the time.
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        self._wait()
        started = clock()
        result = call()
        self._wait()
        self.seconds[stage].append(clock() - started)
        return result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        # The first round compiles, captures and warms up.
        times = {stage: statistics.median(each[1:] or each) for stage, each in self.seconds.items() if each}
        return {"tokens": self.tokens, "differ": self.differ, "largest": self.largest, "seconds": times}


def compare_parts(shape: str) -> dict[str, int]:
    """On CUDA: numbers of a layer's parts whose bits differ between few and many rows, or decoding and training."""
    from posttrain.kernels import decode, train
    from posttrain.kernels.cuda import ordered, sampling
    from posttrain.kernels.cuda.elementwise import rotate_and_store
    from posttrain.kernels.ordered import ordered_product

    preset, found = PRESETS[shape], {}
    kind, heads, keys = (
        {"device": "cuda", "dtype": torch.bfloat16},
        preset.num_attention_heads,
        preset.num_key_value_heads,
    )
    size, width, inner = preset.hidden_size // heads, preset.hidden_size, preset.intermediate_size
    torch.manual_seed(0)
    products = {"qkv": (width, (heads + 2 * keys) * size), "out": (heads * size, width), "gate_up": (width, 2 * inner)}
    for name, (a, b) in {**products, "down": (inner, width)}.items():
        x, weight = torch.randn(4096, a, **kind), 0.02 * torch.randn(b, a, **kind)
        whole = ordered_product(x, weight)
        for rows in (1, 7, 16, 33, 64, 128, 200, 256, 384, 512, 513, 1024, 3000):
            found[f"product {name}, {rows} rows"] = int((ordered_product(x[:rows], weight) != whole[:rows]).sum())
    x, weight = torch.randn(2048, width, **kind), 0.02 * torch.randn(preset.vocab_size, width, **kind)
    logits = torch.mm(x, weight.T, out_dtype=torch.float32)  # pyright: ignore
    for rows in (1, 8, 64, 128, 512, 1000):
        part = torch.mm(x[:rows], weight.T, out_dtype=torch.float32)  # pyright: ignore
        found[f"logits, {rows} rows"] = int((part != logits[:rows]).sum())
    tokens = torch.randint(0, preset.vocab_size, (2048,), device="cuda")
    log_probs = ordered.label_log_probs(logits, tokens, 0.9)
    found["log-probs, 9 rows"] = int(
        (ordered.label_log_probs(logits[7:16], tokens[7:16], 0.9) != log_probs[7:16]).sum()
    )
    source = torch.arange(2048, device="cuda")
    state = (
        torch.full((2048,), 0.9, device="cuda"),
        torch.zeros(2048, dtype=torch.int32, device="cuda"),
        source,
        source,
    )
    token, log_prob = sampling.sample_rows(logits, source, *state)
    found["log-probs of sampled tokens"] = int((log_prob != ordered.label_log_probs(logits, token, 0.9)).sum())
    norm, plain = torch.randn(width, **kind), train.norm_forward
    added = torch.randn_like(x)
    summed = (x.float() + added.float()).to(x.dtype)
    found["norm"] = int((decode.add_rms_norm(x.clone(), added, norm, 1e-6) != plain(summed, norm, 1e-6)[0]).sum())
    length = 1000
    angles = torch.rand(length, size, device="cuda").to(torch.bfloat16)
    cosine, sine = angles.float().cos().to(torch.bfloat16), angles.float().sin().to(torch.bfloat16)
    qkv = torch.randn(length, (heads + 2 * keys) * size, **kind)
    query, key, value = train.split_heads(qkv.clone(), heads, keys, cosine, sine)
    for rows in (1, 7, 512):
        few = train.split_heads(qkv[:rows].clone(), heads, keys, cosine[:rows], sine[:rows])
        same = zip(few, (query, key, value), strict=True)
        found[f"rotation, {rows} rows"] = sum(int((part != whole[:rows]).sum()) for part, whole in same)
    cache = decode.new_cache(40, keys, size, torch.bfloat16, torch.device("cuda"))
    places = torch.arange(length, device="cuda")
    stored = rotate_and_store(query, key, value, cache, places.int(), places, rotation=None, norms=None, epsilon=0.0)
    found["stored queries"] = int((stored != query).sum())
    found["stored keys"] = int((cache[0].transpose(1, 2).flatten(0, 1)[:length] != key).sum())
    sight = train.Sight.of([length])
    sight.exact = True
    trained = train.attention_forward(query, key, value, sight, size**-0.5)[0]
    table = torch.arange(40, dtype=torch.int32, device="cuda").expand(length, -1).contiguous()
    each = (places.int(), torch.zeros(length, dtype=torch.int32, device="cuda"), table)
    newest = ordered.newest_attention(stored, cache, *each, scale=size**-0.5)
    found["attention of single queries"] = int((newest.view_as(trained) != trained).sum())
    gate_up = torch.randn(512, 2 * inner, **kind)
    found["gate"] = int((decode.silu_mul(gate_up[:7]) != decode.silu_mul(gate_up)[:7]).sum())
    return found


def report(sides: dict[bool, dict[str, Any]], names: dict[bool, str]) -> None:
    for exact, facts in sides.items():
        times = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in facts["seconds"].items())
        print(f"{'exact' if exact else 'usual'}: {names[exact]}; {times}")
        for name, count in facts["differ"].items():
            print(f"    {name}: {count:,} tokens differ")
        print(f"    largest difference {facts['largest']:.3g} over {facts['tokens']:,} tokens of rollout and trainer")
    if len(sides) == 2:
        ratios = {stage: sides[True]["seconds"][stage] / seconds for stage, seconds in sides[False]["seconds"].items()}
        whole = [sum(facts["seconds"].values()) for facts in (sides[True], sides[False])]
        said = ", ".join(f"{stage} x{ratio:.2f}" for stage, ratio in ratios.items())
        print(f"cost of exact: {said}; all together x{whole[0] / whole[1]:.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(PRESETS), default="1m", help="random weights of this shape (1m)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the first one is not timed (3)")
    parser.add_argument("--prompts", type=int, default=24, help="prompts of a round (24)")
    parser.add_argument("--group", type=int, default=8, help="responses to each (8)")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="tokens of a prompt, at most (100)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a response, at most (100)")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a training pass (16384)")
    parser.add_argument("--cache-gb", type=float, default=None)
    parser.add_argument(
        "--no-update", action="store_true", help="no optimizer: for shapes whose state does not fit twice"
    )
    parser.add_argument("--only-exact", action="store_true", help="do not compare with a run without the setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    found: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    if options.device == "cuda":
        found["parts"] = compare_parts(options.shape)
        for name, count in found["parts"].items():
            print(f"{'' if count == 0 else '! '}{name}: {count} numbers differ", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    with torch.no_grad() if options.no_update else torch.enable_grad():
        sides = {exact: Side(options, exact=exact) for exact in ((True,) if options.only_exact else (False, True))}
        for number in range(options.rounds):
            for side in sides.values():
                side.round(number)
    facts = {exact: side.facts() for exact, side in sides.items()}
    report(facts, {exact: side.name for exact, side in sides.items()})
    found["usual"], found["exact"] = facts.get(False), facts[True]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))
    return bool(sum(facts[True]["differ"].values()))


if __name__ == "__main__":
    sys.exit(main())
