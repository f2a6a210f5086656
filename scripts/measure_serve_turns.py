"""What `posttrain serve` gains where a turn continues from the KV cache of the turn before: a table.

    python scripts/measure_serve_turns.py [--rows 8] [--turns 16]

Conversations of an untrained model, all at once, without HTTP: each turn sends the whole conversation again, as clients
do. Turns have up to 32 tokens, and 32 tokens of the user follow.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from measure_kv_reuse import PROMPT, _words, untrained_model

from posttrain.commands.serving_model import keep_turns
from posttrain.config.rollout import RolloutConfig
from posttrain.conversations.server import Server
from posttrain.rollout.base import Request, RolloutEngine, Sampling
from posttrain.rollout.native.build import build_native

TOKENS = 32


async def converse(server: Any, number: int, turns: int) -> int:
    """The tokens of all prompts of one conversation."""
    ids, sent = _words(PROMPT, number), 0
    for turn in range(turns):
        output = await server.generate(Request((number, turn), list(ids), Sampling(max_tokens=TOKENS), turn))
        sent += len(ids)
        ids += [*output.token_ids, *_words(TOKENS, number, turn)]
    return sent


async def measure(engine: RolloutEngine, keeps: bool, rows: int, turns: int) -> int:
    async with Server(engine) as plain:
        server = keep_turns(plain, engine.cache_tokens() if keeps else 0)
        return sum(await asyncio.gather(*(converse(server, number, turns) for number in range(rows))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=16)
    given = parser.parse_args()
    model = untrained_model(width=256)
    print("| turns | prompt tokens sent | computed | seconds | requests/s |")
    print("|---|---|---|---|---|")
    for name, keeps in (("computed anew", False), ("continued", True)):
        engine, _ = build_native(model, RolloutConfig(kv_cache_gb=2.0), decode=None)
        start = time.perf_counter()
        sent = asyncio.run(measure(engine, keeps, given.rows, given.turns))
        seconds, requests = time.perf_counter() - start, given.rows * given.turns
        print(f"| {name} | {sent} | {engine.prompt_tokens} | {seconds:.1f} | {requests / seconds:.1f} |")


if __name__ == "__main__":
    main()
