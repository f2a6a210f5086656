#!/usr/bin/env python3
"""Speed of the native rollout engine on a CUDA device with a mixture of experts, and where a decode step's time goes.

    python scripts/measure_mixture.py                 # 4 layers, then 48, at 512 and 1,024 rows
    python scripts/measure_mixture.py --sweep         # first tries cuts of the experts' products, and takes the best
    python scripts/measure_mixture.py --sweep --layers 4 --rows 512
    python scripts/measure_mixture.py --fp8 --layers 48

The shape is that of Qwen3-30B-A3B with random bfloat16 weights, which are drawn on the device. Responses are sampled in
groups that share a prompt and never end early. A step's parts are each captured as a graph over all layers, so that
weights come from memory as they do in a step.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from decode_speed import DEVICE, DTYPE, draw_model, measure_speed
from transformers import Qwen3MoeConfig

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels.cuda import FINE, LEAST_ROWS, experts, fused_products
from posttrain.kernels.cuda.experts import Tile
from posttrain.kernels.cuda.fp8 import quantize_rows
from posttrain.kernels.cuda.paged_attention import StepRows, decode_attention, splits_for
from posttrain.kernels.cuda.sampling import chunk_room
from posttrain.kernels.decode import BLOCK, add_rms_norm
from posttrain.kernels.quantized import FP8, Quantized
from posttrain.models.feed_forward import Mixture
from posttrain.rollout.engines import why_wrong
from posttrain.rollout.native.build import build_native

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LAYERS, FEW_LAYERS, SWEPT_LAYERS = 48, 4, 6
PREFILL = 8192  # tokens: the cut for prompts
SWEPT_ROWS = (64, 256, 512, 1024, PREFILL)
BANDWIDTH = 4.8e12  # bytes a second of an H200


def candidates(fp8: bool) -> list[Tile]:
    plain = [(16, 32, 128, 4, 4), (32, 32, 128, 4, 4), (64, 32, 128, 4, 3), (64, 64, 64, 4, 4), (128, 64, 64, 8, 3)]
    described = [
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 8, 3),
        (128, 128, 64, 8, 3),
    ]
    turned = [(64, 64, 4, 4), (64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 4), (128, 64, 8, 4)]
    found = [Tile(*one) for one in plain]
    found += [Tile(*one, described=True) for one in described]
    found += [Tile(32, 64, 64, 4, 4, turned=True), Tile(64, 64, 64, 4, 4, turned=True)]
    found += [Tile(rows, *one, turned=True, described=True) for rows in (16, 32, 64, 128) for one in turned]
    if fp8:  # the copy engine's tiles of as many bytes, and of half as many
        found = [tile for tile in found if tile.described]
        found += [replace(tile, depth=2 * tile.depth) for tile in found]
    return found


def timed(work: Callable[[], Any], replays: int = 5) -> float:
    """Milliseconds of a captured graph of `work`, the best of some replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    best = float("inf")
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best


def over_all(product: Callable[..., Any], given: list[tuple[Any, ...]]) -> None:
    for one in given:
        product(*one)


def normed(rows: int) -> torch.Tensor:
    return F.rms_norm(torch.randn(rows, SHAPE["hidden_size"], device=DEVICE), (SHAPE["hidden_size"],)).to(DTYPE)


def route(x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(shares, order of the pairs, where each expert's end)."""
    top_k, normalised = SHAPE["num_experts_per_tok"], SHAPE["norm_topk_prob"]
    chosen, share = experts.choose_experts(F.linear(x, router), top_k, normalised=normalised, share_dtype=x.dtype)
    return share, *experts.sort_pairs(chosen, len(router))


# -- cuts of the experts' products ------------------------------------------------------------------------------------
def sweep(rows_swept: tuple[int, ...], fp8: bool) -> tuple[tuple[float, Tile, Tile], ...]:
    """The best cut of each product by number of rows, as `experts.TILES` holds them; everything is printed."""
    torch.manual_seed(0)
    count, width, size = SHAPE["num_experts"], SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * 0.02

    layers = [(drawn(count, 2 * size, width), drawn(count, width, size)) for _ in range(SWEPT_LAYERS)]
    if fp8:
        layers = [(quantize_rows(one), quantize_rows(other)) for one, other in layers]
    router = drawn(count, width)
    tiles = candidates(fp8)
    started = time.perf_counter()
    compile_all(tiles, layers[0], route(normed(64), router))
    print(f"sweep: {len(tiles)} cuts of two products compiled in {time.perf_counter() - started:.0f} s", flush=True)
    best: list[tuple[int, Tile, Tile]] = []
    for rows in rows_swept:
        x = normed(rows)
        _, order, ends = route(x, router)
        mean = len(order) / count
        fitting = [tile for tile in tiles if mean / 4 <= tile.rows <= max(16, 4 * mean)] or tiles[-6:]
        if rows == PREFILL:
            fitting = [tile for tile in tiles if tile.rows >= 64]
        x = quantize_rows(x) if fp8 else x
        gated = experts.gate_up_pairs(x, layers[0][0], order, ends, fitting[0], DTYPE)
        inner = quantize_rows(gated) if fp8 else gated
        parts = experts.down_pairs(inner, layers[0][1], order, ends, fitting[0], DTYPE)
        wins = []
        for name, number, given, wanted, product in (
            ("gate and up", 0, x, gated, experts.gate_up_pairs),
            ("down", 1, inner, parts, experts.down_pairs),
        ):
            found = []
            for tile in fitting:
                try:
                    y = product(given, layers[0][number], order, ends, tile, DTYPE)
                    off = float((y.float() - wanted.float()).abs().max() / wanted.float().abs().max())
                    if not off < 0.02:
                        print(f"  WRONG: {name}, {tile}, off by {off:.3g}")
                        continue
                    given_all = [(given, layer[number], order, ends, tile, DTYPE) for layer in layers]
                    found.append((timed(partial(over_all, product, given_all)) / len(layers) * 1e3, tile))
                except Exception as error:
                    print(f"  not possible: {name}, {tile}: {type(error).__name__} {str(error)[:90]}")
            found.sort(key=lambda one: one[0])
            floor = sum(part.nbytes for part in as_parts(layers[0][number])) / BANDWIDTH * 1e6
            shown = "; ".join(f"{us:.0f} us {tile}" for us, tile in found[:6])
            print(f"rows {rows} (mean {mean:.0f} an expert), {name}, floor {floor:.0f} us: {shown}", flush=True)
            wins.append(found[0])
        print(f"rows {rows}: both {wins[0][0] + wins[1][0]:.0f} us a layer")
        best.append((rows, wins[0][1], wins[1][1]))
    return table_of(best)


def as_parts(x: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x) if isinstance(x, Quantized) else (x,)


def compile_all(tiles: list[Tile], layer: tuple[Any, Any], routed: Any) -> None:
    """Compiling takes seconds a kernel and lets other threads run; what fails here is told where it is measured."""
    _, order, ends = routed
    fp8, x = isinstance(layer[0], Quantized), normed(64)
    x = quantize_rows(x) if fp8 else x
    gated = experts.gate_up_pairs(x, layer[0], order, ends, tiles[0], DTYPE)
    gated = quantize_rows(gated) if fp8 else gated
    experts.down_pairs(gated, layer[1], order, ends, tiles[0], DTYPE)

    def one(tile: Tile) -> None:
        for product, given, weight in ((experts.gate_up_pairs, x, layer[0]), (experts.down_pairs, gated, layer[1])):
            try:
                product(given, weight, order, ends, tile, DTYPE)
            except Exception:
                continue

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, tiles[1:]))
    torch.cuda.synchronize()


def table_of(best: list[tuple[int, Tile, Tile]]) -> tuple[tuple[float, Tile, Tile], ...]:
    """Each cut serves up to half way, in powers, to the next number of rows."""
    each = SHAPE["num_experts_per_tok"] / SHAPE["num_experts"]
    means = [rows * each for rows, _, _ in best]
    limits = [round((one * other) ** 0.5) for one, other in pairwise(means)]
    table = tuple((limit, *tiles) for limit, (_, *tiles) in zip([*limits, float("inf")], best, strict=True))
    print("TILES of posttrain/kernels/cuda/experts.py would be:")
    for limit, *tiles in table:
        words = ", ".join(repr(tile) for tile in tiles)
        print(f"    ({limit if limit != float('inf') else 'inf'}, {words}),")
    return table  # pyright: ignore


# -- the engine -------------------------------------------------------------------------------------------------------
def measure(layers: int, options: argparse.Namespace) -> None:
    started = time.perf_counter()
    model = draw_model(Qwen3MoeConfig(num_hidden_layers=layers, **SHAPE))
    size = sum(weight.nbytes for weight in model.parameters())
    torch.cuda.synchronize()
    print(f"\n== {layers} layers, {size / 1e9:.1f} GB, drawn in {time.perf_counter() - started:.1f} s", flush=True)
    settings = RolloutConfig(max_num_seqs=max(options.rows), kv_cache_gb=options.cache_gb)
    engine, name = build_native(model, settings, decode=None, fp8=options.fp8)
    started = time.perf_counter()
    print(f"engine: {name}")
    print(f"log-probs against transformers': {why_wrong(engine, model) or 'equal up to rounding'} "
          f"({time.perf_counter() - started:.1f} s)", flush=True)  # fmt: skip
    for rows in options.rows:
        step_ms = rates(engine, rows, options)
        parts(engine, rows, step_ms, options)
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def rates(engine: Any, rows: int, options: argparse.Namespace) -> float:
    """Milliseconds of a decode step; tokens a second are of the whole generation, prompts included."""
    speed = measure_speed(engine, rows, SHAPE["vocab_size"], options)
    each = ", ".join(f"{rate:,.0f}" for rate in speed.rates)
    print(
        f"\nrows {rows}, {options.prompt} + {options.tokens} tokens, groups of {options.group}: "
        f"{max(speed.rates):,.0f} tokens/s, best of {each}; {speed.step_ms:.2f} ms a step, "
        f"prompts {speed.prompt_s * 1e3:.0f} ms (the first run, which compiles and captures: {speed.first_s:.1f} s)",
        flush=True,
    )
    return speed.step_ms


def parts(engine: Any, rows: int, step_ms: float, options: argparse.Namespace) -> None:
    """Where the time of a step goes, at the mean length of a row."""
    decoder, size, width = engine.decoder, rows, SHAPE["hidden_size"]
    step = step_rows(engine, rows, options)
    how = {"scale": decoder.scale, "rotation": decoder._rotation(options.prompt + options.tokens, DEVICE)}
    how |= {"epsilon": decoder.epsilon}
    layers, caches = (
        decoder.layers,
        [engine.pool.layer(n, decoder.key_heads, decoder.size) for n in range(len(decoder.layers))],
    )
    x, residual = normed(rows), torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
    qkv, attended = layers[0].qkv(x), torch.randn(rows, decoder.heads * decoder.size, device=DEVICE, dtype=DTYPE)
    mixtures = [layer.feed for layer in layers if isinstance(layer.feed, Mixture)]
    share, order, ends = route(x, mixtures[0].router_XE)
    first, second = experts.tiles_for(len(order), SHAPE["num_experts"], FP8 if options.fp8 else DTYPE)
    held: list[tuple[Any, Any]] = [(one.gate_up_X2IE, one.down_XEI) for one in mixtures]
    given: Any = x
    if options.fp8:
        held = [tuple(copy.rounded for copy in one.fp8 or ()) for one in mixtures]  # pyright: ignore
        given = quantize_rows(x)
    gated: Any = experts.gate_up_pairs(given, held[0][0], order, ends, first, DTYPE)
    gated = quantize_rows(gated) if options.fp8 else gated
    down = experts.down_pairs(gated, held[0][1], order, ends, second, DTYPE)
    works: dict[str, Callable[[], Any]] = {
        "norms": lambda: [
            add_rms_norm(residual, x, weight, decoder.epsilon)
            for layer in layers for weight in (layer.before, layer.between)
        ],
        "product qkv": lambda: [layer.qkv(x) for layer in layers],
        "attention": lambda: [
            decode_attention(qkv, cache, step, window=None, norms=layer.heads, **how)
            for layer, cache in zip(layers, caches, strict=True)
        ],
        "product out": lambda: [layer.out(attended) for layer in layers],
        "router": lambda: [route(x, one.router_XE) for one in mixtures],
        "experts, gate and up": lambda: [
            experts.gate_up_pairs(given, one, order, ends, first, DTYPE) for one, _ in held
        ],
        "experts, down": lambda: [experts.down_pairs(gated, one, order, ends, second, DTYPE) for _, one in held],
        "experts, weighted sum": lambda: [experts.weigh_parts(down, share) for _ in mixtures],
    }  # fmt: skip
    found = {name: timed(work) for name, work in works.items()}
    tokens = torch.randint(0, SHAPE["vocab_size"], (size,), device=DEVICE)
    decoder.captured_caches = caches
    try:
        whole = timed(lambda: decoder.next_hidden(tokens, step))
        loads = expert_loads(lambda: decoder.next_hidden(tokens, step))
    finally:
        decoder.captured_caches = []
    weight = decoder.head_weight()
    if fused_products.takes(x, weight, LEAST_ROWS):
        room, temperature = chunk_room(rows, len(weight), FINE, DEVICE), torch.ones(rows, device=DEVICE)
        head = timed(lambda: fused_products.head_sums(x, weight, temperature, room))
    else:
        head = timed(lambda: decoder.logits(x))
    count = len(layers)
    for name, ms in found.items():
        print(f"  {name:24s}{ms:8.3f} ms {ms / count * 1e3:8.1f} us a layer")
    print(f"  {'their sum':24s}{sum(found.values()):8.3f} ms")
    print(f"  {'all layers together':24s}{whole:8.3f} ms {whole / count * 1e3:8.1f} us a layer")
    print(f"  {'head':24s}{head:8.3f} ms")
    print(f"  {'sampler and the rest':24s}{step_ms - whole - head:8.3f} ms (what is left of a step)")
    print(f"  cuts: {first} | {second}; tokens of an expert: {loads}", flush=True)


def step_rows(engine: Any, rows: int, options: argparse.Namespace) -> StepRows:
    """Rows of the mean length, which write nothing; those of a group read the same prompt."""
    prompt, own = -(-options.prompt // BLOCK), -(-options.tokens // BLOCK)
    groups = torch.arange(rows) // options.group
    shared = groups[:, None] * prompt + torch.arange(prompt)
    others = (int(groups[-1]) + 1) * prompt + torch.arange(rows)[:, None] * own + torch.arange(own)
    table = (torch.cat([shared, others], 1) % engine.pool.size).int().to(DEVICE)

    def all_of(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    made, longest = options.tokens // 2, options.prompt + options.tokens
    lengths = all_of(prompt * BLOCK + made + 1)
    splits = splits_for(rows, engine.decoder.key_heads, longest)
    return StepRows(
        all_of(options.prompt + made), all_of(-1, torch.int64), lengths, all_of(options.prompt), table, splits
    )


def expert_loads(work: Callable[[], Any]) -> str:
    seen, kept = [], experts.sort_pairs
    try:
        experts.sort_pairs = lambda *given: (seen.append(kept(*given)), seen[-1])[1]
        work()
    finally:
        experts.sort_pairs = kept
    counts = torch.stack([ends.diff(prepend=ends.new_zeros(1)) for _, ends in seen]).float()
    none = float((counts == 0).float().mean())
    return f"mean {counts.mean():.1f}, most {counts.max():.0f}, none at {none:.1%} of them"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[FEW_LAYERS, LAYERS])
    parser.add_argument("--rows", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cache-gb", type=float, default=48)
    parser.add_argument("--fp8", action="store_true", help="products of fp8 copies")
    parser.add_argument("--sweep", action="store_true", help="try cuts of the experts' products, and take the best")
    parser.add_argument("--sweep-rows", type=int, nargs="*", default=list(SWEPT_ROWS))
    options = parser.parse_args()
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if options.sweep:
        setattr(experts, "FP8_TILES" if options.fp8 else "TILES", sweep(tuple(options.sweep_rows), options.fp8))
    for layers in options.layers:
        measure(layers, options)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\nall of it took {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
