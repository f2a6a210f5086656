"""How many turns of conversations continue from the KV cache, by the size of its pool: a table.

    python scripts/measure_kv_reuse.py [--rows 64] [--turns 8] [--one-by-one] [--long]

Conversations in groups of 4 with an untrained model. A turn may have all the tokens that its response has left, as in
a run, and ends at one of a few stop tokens (after about 30); 16 observation tokens follow it. A pool of 1x holds rows x
(prompt + longest response) tokens. `whole` counts turns that found all that the turn before left in the cache, `tokens`
the share of that which was found. Turns are admitted in rounds, or (--one-by-one) as soon as the turn before has ended.
--long measures conversations of 64 turns instead: the seconds of the first and of the last 16.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels.decode import BLOCK
from posttrain.models.attention import ATTENTION
from posttrain.models.norms import fuse_norms
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.native.build import build_native
from posttrain.rollout.sampling import combine_seeds

GROUP, PROMPT, OBSERVATION, WORDS = 4, 64, 16, 512
STOPS = tuple(range(17))  # of 512 tokens that are about as likely: a turn has 30 tokens on average


@dataclass
class Conversation:
    number: int
    ids: list[int]
    left: int
    turn: int = 0
    seconds: list[float] = field(default_factory=list)
    left_behind: int = 0
    """Tokens that the last turn left in the cache."""

    def request(self) -> Request:
        parent = (self.number, self.turn - 1) if self.turn else None
        seed = combine_seeds(self.number, self.turn)
        sampling = Sampling(max_tokens=self.left, stop_token_ids=STOPS)
        return Request((self.number, self.turn), list(self.ids), sampling, seed, parent, keep=True)

    def receive(self, output: Output, turns: int) -> bool:
        """Whether another turn follows."""
        self.ids += output.token_ids
        self.left_behind = len(self.ids) - 1
        self.ids += _words(OBSERVATION, self.number, self.turn)
        self.left -= len(output.token_ids) + OBSERVATION
        self.turn += 1
        return self.turn < turns and self.left > 0 and output.finish_reason == "stop"


def _words(count: int, *seed: int) -> list[int]:
    return [combine_seeds(*seed, place) % (WORDS - len(STOPS)) + len(STOPS) for place in range(count)]


def untrained_model(width: int = 128) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=WORDS, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, max_position_embeddings=8192,
        initializer_range=0.02, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32).eval()
    fuse_norms(model)
    return model


def converse(engine: NativeEngine, rows: int, turns: int, response: int, *, in_rounds: bool) -> tuple[int, list[float]]:
    """(tokens that turns left in the cache for the next ones, the second at which each round or turn ended)."""
    prompts = [_words(PROMPT, 10_000 + group) for group in range(-(-rows // GROUP))]
    talks = [Conversation(number, list(prompts[number // GROUP]), response) for number in range(rows)]
    ready, left_behind, times = list(talks), 0, [time.perf_counter()]
    while ready or engine.has_work():
        if ready and not (in_rounds and engine.has_work()):
            times.append(time.perf_counter())
            for talk in ready:
                engine.submit(talk.request())
            ready = []
        for output in engine.step():
            talk = talks[output.id[0]]  # pyright: ignore
            if talk.receive(output, turns):
                ready.append(talk)
                left_behind += talk.left_behind
            else:
                engine.release([output.id])
    return left_behind, [*times[1:], time.perf_counter()]


def measure_pools(rows: int, turns: int, response: int, *, in_rounds: bool) -> None:
    model = untrained_model()
    print(f"{rows} conversations, prompts of {PROMPT}, responses of up to {response} tokens, up to {turns} turns")
    print("| pool | turns that continue | whole | tokens | prompt tokens computed | seconds |")
    print("|---|---|---|---|---|---|")
    needed = 0
    for share in (2.0, 1.0, 0.5, 0.25):
        engine, _ = build_native(model, RolloutConfig(kv_cache_gb=1.0), decode=None)
        engine.pool.limit = int(share * rows * (PROMPT + response)) // BLOCK
        start = time.perf_counter()
        left_behind, _ = converse(engine, rows, turns, response, in_rounds=in_rounds)
        seconds, queue = time.perf_counter() - start, engine.queue
        needed = needed or engine.prompt_tokens  # with room for everything, nothing is computed twice
        found = 1 - (engine.prompt_tokens - needed) / left_behind
        print(
            f"| {share:g}x | {queue.turns} | {queue.continued / queue.turns:.0%} | {found:.0%} "
            f"| {engine.prompt_tokens} | {seconds:.1f} |"
        )


def measure_long(rows: int, turns: int) -> None:
    response = turns * 80
    engine, _ = build_native(untrained_model(width=768), RolloutConfig(kv_cache_gb=1.0), decode=None)
    _, times = converse(engine, rows, turns, response, in_rounds=True)
    seconds = [after - before for before, after in pairwise(times)]
    first, last = (sum(part) / len(part) for part in (seconds[1:17], seconds[-16:]))
    print(f"{rows} conversations of {turns} turns: {first:.3f} s a turn in the first 16, {last:.3f} s in the last 16")
    print(f"{engine.queue.continued} of {engine.queue.turns} turns continued from the cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--response", type=int, default=768)
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--long", action="store_true")
    given = parser.parse_args()
    if given.long:
        measure_long(8, 64)
    else:
        measure_pools(given.rows, given.turns, given.response, in_rounds=not given.one_by_one)


if __name__ == "__main__":
    main()
