#!/usr/bin/env python3
"""vLLM on the work of `measure_mixture.py`, `measure_families.py` and `measure_fp8.py`: the same shape, prompts, groups
and lengths, and a log-prob for each token.

    python scripts/measure_mixture_vllm.py --rows 512 1024
    python scripts/measure_mixture_vllm.py --rows 512 1024 --set quantization=fp8
    python scripts/measure_mixture_vllm.py --model 7b --tokens 512 --rows 64 512 1024 --set quantization=fp8

Weights are vLLM's own random ones (`load_format=dummy`): on disk they would take 61 GB. Its settings are those of
`posttrain bench rollout`, and the first run warms up.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from needs import need

need("vllm", get='pip install "posttrain[vllm]"')
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "posttrain" / "bench" / "peers"))  # run_vllm's folder
import vllm  # noqa: E402
from decode_speed import grouped_prompts  # noqa: E402
from family_shapes import SHAPES, configuration  # noqa: E402
from measure_mixture import LAYERS, SHAPE  # noqa: E402
from transformers import Qwen2Config, Qwen3MoeConfig  # noqa: E402

from posttrain.bench.workload import PRESETS  # noqa: E402

NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mixture", *SHAPES, *PRESETS], default="mixture", help="a shape")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the mixture")
    parser.add_argument("--rows", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of vLLM's LLM")
    options = parser.parse_args()
    more = {name: _value(text) for name, _, text in (item.partition("=") for item in options.set)}
    with tempfile.TemporaryDirectory() as folder:
        config: Any = Qwen3MoeConfig(**SHAPE, num_hidden_layers=options.layers, dtype="bfloat16")
        if options.model in SHAPES:
            config = configuration(options.model)
        elif options.model != "mixture":
            config = Qwen2Config(**asdict(PRESETS[options.model]) | NO_TOKENS)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        started = time.perf_counter()
        length = options.prompt + options.tokens
        settings = importlib.import_module("run_vllm").on_cuda(max(options.rows), length) | more
        engine = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length + 1,
            max_num_seqs=max(options.rows), disable_log_stats=True, seed=0, **settings,
        )  # fmt: skip
    ready = time.perf_counter() - started
    print(
        f"vLLM {vllm.__version__}, {options.model}, {config.num_hidden_layers} layers, {more}: ready in {ready:.0f} s",
        flush=True,
    )
    for rows in options.rows:
        prompts = [{"prompt_token_ids": prompt} for prompt in grouped_prompts(rows, config.vocab_size, options)]
        found = []
        for run in range(options.repeat + 1):
            params = [
                vllm.SamplingParams(
                    temperature=1.0, max_tokens=options.tokens, ignore_eos=True, logprobs=0, detokenize=False,
                    seed=None,
                )
                for _ in prompts
            ]  # fmt: skip
            engine.reset_prefix_cache()
            begun = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            taken = time.perf_counter() - begun
            assert all(len(output.outputs[0].token_ids) == options.tokens for output in outputs)
            found += [rows * options.tokens / taken] if run else []
        each = ", ".join(f"{one:,.0f}" for one in found)
        print(f"vLLM, rows {rows}: {max(found):,.0f} tokens/s, best of {each}", flush=True)


def _value(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


if __name__ == "__main__":
    main()
