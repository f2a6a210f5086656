"""`posttrain serve MODEL`: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from posttrain.commands.generation.command import settings_folder
from posttrain.commands.generation.settings import Settings, check_model, read_settings, split_words
from posttrain.conversations.serving import require_aiohttp
from posttrain.errors import UserError
from posttrain.spelling import OptionParser
from posttrain.tracking.progress import waiting
from posttrain.trainer.constants_ppo import apply_environment

USAGE = "posttrain serve MODEL [--host ADDRESS] [--port N] [options] [key=value ...]"
KEY_VARIABLE = "POSTTRAIN_API_KEY"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
USED = (
    "data.apply_chat_template_kwargs",
    *(f"{_MODEL}.{name}" for name in ("tokenizer_path", "trust_remote_code", "dtype", "override_config")),
    *(f"{_ROLLOUT}.{name}" for name in ("name", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "ignore_eos")),
    *(f"{_ROLLOUT}.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_gb")),
    *(f"{_ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "engine_kwargs", "multi_turn.format")),
    "trainer.device",
)
FOR_A_RUN = (
    *(f"{_ROLLOUT}.{cut}_model_parallel_size" for cut in ("tensor", "pipeline")),
    *(f"{_MODEL}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")),
)
"""What only a server for a run takes: processes that hold its engine together, and what an engine that is sent LoRA
adapters alone must know of them."""


def main(args: Sequence[str]) -> int:
    """Serve until interrupted."""
    api_key = os.environ.get(KEY_VARIABLE) or None
    options, model, settings = read(args, api_key)
    with waiting():
        from posttrain.commands.serving_model import serve

    return serve(model, settings, options, api_key, args)


def read(args: Sequence[str], api_key: str | None = "") -> tuple[argparse.Namespace, str, Settings]:
    """(options, MODEL, settings) of a command line that can be served with this key."""
    options, model, overrides = _parse(args)
    if options.accept_weights and api_key is None:
        raise UserError(
            "--accept-weights lets a client replace the weights, and there is no key.\n"
            f"  to do:  set {KEY_VARIABLE} to a secret of your own, here and for the run that connects"
        )
    if options.host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        raise UserError(
            f"--host {options.host} lets other machines in, and there is no key.\n"
            f"  to do:  set {KEY_VARIABLE}, which clients then send as their API key, or leave --host out"
        )
    require_aiohttp()
    apply_environment()
    check_model(model)
    used = (*USED, *FOR_A_RUN) if options.accept_weights else USED
    settings = read_settings(options, overrides, settings_folder(model), used=used)
    if not options.accept_weights:  # a checkpoint's run may have had more
        rollout = settings.config.actor_rollout_ref.rollout
        rollout.tensor_model_parallel_size = rollout.pipeline_model_parallel_size = 1
    return options, model, settings


def _parse(args: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    parser = OptionParser(
        prog="posttrain serve",
        usage=USAGE,
        description="Serves a model: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and more.",
    )
    parser.add_argument("words", nargs="*", metavar="MODEL", help="folder, hub id, `embedded`, or a run's checkpoint")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen on (default 8000; 0: any)")
    parser.add_argument("--served-name", metavar="NAME", help="the model's name in requests (default: MODEL)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a prompt with its response")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="where a request has none (default 1; 0: greedy)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="where a request has none (default 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="where a request has none (default: all tokens)")
    parser.add_argument(
        "--accept-weights",
        action="store_true",
        help="generate for a training run (rollout.name=server), which sends weights, instead of serving APIs",
    )
    parser.add_argument("--engine", metavar="NAME", help="native (default), hf, vllm or sglang")
    parser.add_argument("--device", metavar="NAME", help="auto (default), cpu or cuda")
    parser.add_argument("--dtype", metavar="NAME", help="auto (default), float32 or bfloat16")
    options = parser.parse_intermixed_args(list(args))
    model, overrides = split_words(options.words, "serve")
    if model is None:
        parser.error("MODEL is missing: a folder, a hub id, `embedded` or a checkpoint")
    if not 0 <= options.port < 65536:
        parser.error(f"--port {options.port}: a port is a number from 0 to 65535")
    if options.max_model_len is not None and options.max_model_len < 2:
        parser.error(f"--max-model-len {options.max_model_len}: at least 2")
    options.n, options.model = 1, model
    options.temperature = 1.0 if options.temperature is None else options.temperature
    return options, model, overrides
