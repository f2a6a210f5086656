"""Tokens computed and seconds of an update's gradients on samples of several rows, with shared beginnings and without.

    python scripts/measure_row_trees.py                              a tiny model on a CPU
    python scripts/measure_row_trees.py --device cuda --shape 0.5b   Qwen2.5-0.5B's shapes, random weights, bfloat16
    python scripts/measure_row_trees.py --device cuda --shape 7b --lora-rank 32

Conversations of `--turns` turns whose thinking is dropped from the history: every turn is a row of its own, and begins
with the history so far. The table has the tokens of all rows, those that are computed, those that are trained, and
seconds; below it, how far the two gradients are apart (rounding: 1e-5 in float32, about 1e-2 in bfloat16).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.config.model import ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.micro_batches import plan_passes
from posttrain.engine.torch_engine import TorchEngine
from posttrain.models.loading import fuse_and_prove, own_attention
from posttrain.models.lora import add_adapters
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch

# Width, inner width, layers, heads of queries and of keys, vocabulary.
SHAPES = {
    "tiny": (128, 256, 2, 4, 2, 512),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    width, inner, layers, heads, key_heads, words = SHAPES[shape]
    settings = Qwen2Config(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, **own_attention(settings))
    return fuse_and_prove(model.eval(), f"random weights of shape {shape}")


def make_batch(options: argparse.Namespace, words: int) -> DataProto:
    """`groups` prompts x `samples` conversations x `turns` rows."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, words, count).tolist()

    prompts, outputs = [], []
    names = ("uid", "sample", "branch", "parent", "fork", "turn_ends")
    fields: dict[str, list] = {name: [] for name in names}
    for group in range(options.groups):
        prompt = tokens(options.prompt)
        for sample in range(options.samples):
            history: list[int] = []
            for turn in range(options.turns):
                answer = tokens(options.answer)
                written = [*tokens(options.thinking), *answer]
                marks = [False] * len(history) + [True] * len(written)
                ids = [*history, *written]
                prompts.append(prompt)
                outputs.append(Output((group, sample), ids, [-1.0] * len(ids), "stop", written=marks))
                parent = turn - 1 if turn else None
                values = (str(group), sample, turn, parent, len(prompt) + len(history), [(turn, len(ids))])
                for name, value in zip(names, values, strict=True):
                    fields[name].append(value)
                history = [*history, *answer, *tokens(options.observation)]
    return to_batch(prompts, outputs, pad_token_id=0).union(DataProto.from_dict(non_tensors=fields))


def measure(engine: TorchEngine, batch: DataProto, device: torch.device, repeats: int) -> tuple[float, torch.Tensor]:
    """(seconds of the fastest of `repeats`, the gradient of the first layer's output projection)."""
    trained = float(batch.batch["response_mask"].sum())

    def loss(micro: DataProto, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return -(outputs["log_probs"] * micro.batch["response_mask"]).sum() / trained

    best = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        assert engine.optimizer is not None
        engine.optimizer.clear_gradients()
        wait(device)
        start = time.perf_counter()
        engine.runner.gradients(batch, loss)
        wait(device)
        best = min(best, time.perf_counter() - start)
    assert engine.optimizer is not None
    grads = [master.grad for master in engine.optimizer.masters if master.grad is not None]
    chosen = max((grad for grad in grads if grad.ndim == 2), key=lambda grad: grad.numel())
    return best, chosen.float().clone()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank (0: all weights)")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--samples", type=int, default=2)
    sizes = {"prompt": 512, "thinking": 192, "answer": 64, "observation": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="tokens")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a pass")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(options.shape, device, dtype)
    if options.lora_rank:
        model = add_adapters(model, ModelConfig(lora_rank=options.lora_rank))
    batch = make_batch(options, SHAPES[options.shape][-1])
    print(f"{len(batch)} rows of {options.groups} x {options.samples} conversations of {options.turns} turns, {dtype}")
    print("| beginnings | tokens of rows | computed | trained | passes | seconds |\n|---|---:|---:|---:|---:|---:|")
    found: dict[bool, tuple[float, torch.Tensor]] = {}
    for share in (False, True):
        settings = EngineSettings(
            device=device,
            optim=OptimConfig(),
            token_budget=options.budget,
            share_prompts=share,
            gradient_checkpointing=options.shape == "7b",
        )
        engine = TorchEngine(model, settings)
        passes = plan_passes(batch, engine.facts())
        computed = sum(unit.tokens for units in passes for unit in units)
        seconds, _ = found[share] = measure(engine, batch, device, options.repeats)
        of_rows, trained = (int(batch.batch[name].sum()) for name in ("attention_mask", "response_mask"))
        words = "shared" if share else "separate"
        print(f"| {words} | {of_rows} | {computed} | {trained} | {len(passes)} | {seconds:.2f} |", flush=True)
        del engine
    (apart, one), (together, other) = found[False], found[True]
    print(f"{apart / together:.2f}x; the gradients differ by {float((one - other).norm() / one.norm()):.1e}")


if __name__ == "__main__":
    main()
