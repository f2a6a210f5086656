"""Section `actor_rollout_ref.rollout`: how responses are generated."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.data import NO_VALIDATION
from posttrain.config.schema import Section, section
from posttrain.config.trainer import ON_CPU, rollout_workers_of
from posttrain.settings import (
    COUNT_OR_ALL,
    GROUP,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_SHARE,
    SECONDS,
    SHARE,
    ZERO_OR_MORE,
    Idle,
    setting,
)

_GREEDY = (".do_sample is False", NO_VALIDATION)
_SERVER = ".name is server, where it is an option of `posttrain serve`"
_NO_SERVER = "actor_rollout_ref.rollout.name is not server"
_COLOCATED = Idle("the workers that generate also train", lambda config: not rollout_workers_of(config))
_WAVES = (".name is hf, which decodes in waves", _SERVER)


@section
class ValSamplingConfig(Section):
    """Sampling in validation."""

    n: int = setting(1, range=GROUP, idle=NO_VALIDATION)
    """Responses per validation prompt (the k of mean@k, pass@k and maj@k)."""
    do_sample: bool = setting(False, idle=NO_VALIDATION)
    """Sample; false takes the most likely token."""
    temperature: float = setting(1.0, range=POSITIVE, idle=_GREEDY)
    """Temperature when sampling."""
    top_p: float = setting(1.0, range=POSITIVE_SHARE, idle=_GREEDY)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, range=COUNT_OR_ALL, idle=_GREEDY)
    """Sample from this many most likely tokens; -1 takes all."""


@section
class ServerConfig(Section):
    """Rollout engines in other processes (`rollout.name=server`)."""

    url: list[str] = setting(factory=list, idle=_NO_SERVER)
    """Addresses of servers that `posttrain serve MODEL --accept-weights` started; requests are spread over them."""
    timeout_s: float = setting(60.0, range=SECONDS, idle=_NO_SERVER)
    """Seconds without a sign of life after which a server counts as lost; while it computes it gives one every five."""


@section
class RolloutConfig(Section):
    """Generation of responses. Example: `actor_rollout_ref.rollout.n=5`."""

    name: str = "native"
    """Rollout engine: `native` (posttrain's own), `hf` (transformers: the oracle), `vllm` (where vLLM is installed),
    `sglang` (where SGLang is installed), `server` (engines in other processes, by `server.url`)."""
    n: int = setting(1, range=GROUP)
    """Responses per prompt; estimators that compare a group need more than 1 (unset they get 5)."""
    temperature: float = setting(1.0, range=POSITIVE)
    """Sampling temperature; training uses the same one."""
    top_p: float = setting(1.0, range=POSITIVE_SHARE)
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: int = setting(-1, range=COUNT_OR_ALL)
    """Sample from this many most likely tokens; -1 takes all."""
    min_p: float = setting(0.0, range=SHARE)
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = setting(1.0, range=POSITIVE)
    """Divide the scores of tokens that occurred before by this; 1 switches it off."""
    stop: list[str] = setting(factory=list, is_literal=True)
    """Texts that end a response besides the end-of-sequence token."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token up to the length limit."""
    max_num_seqs: int = setting(1024, range=ONE_OR_MORE, idle=_SERVER)
    """Responses decoded side by side."""
    max_num_batched_tokens: int | None = setting(None, idle=_WAVES)
    """Tokens computed in one step of the engine; longer prompts are computed in pieces. null is 16384 on a GPU, which
    fewer would leave waiting for the host, and 8192 elsewhere."""
    kv_cache_gb: float | None = setting(None, idle=_WAVES)
    """Most memory that the key/value cache may take, in GiB; null is what the memory plan leaves of a GPU, and 30% of
    the memory elsewhere."""
    quantization: str | None = setting(None, choices=("fp8",))
    """`fp8` decodes with 8-bit copies of weights and activations (`native`): faster and less exact, so that importance
    weights (`algorithm.rollout_correction`) are on with it. null: `model.dtype`."""
    enable_rollout_routing_replay: bool = False
    """Record which experts of a mixture every token takes in the rollout (`native`); `actor.router_replay.mode=R3`
    replays them, and without it `actor/route_changes` says how many differ in the trainer."""
    speculation: str | None = setting(None, choices=("batch", "epochs"))
    """Verify drafts of the next tokens where few responses are left and it pays (`native`): the same tokens, sooner.
    Drafts are what followed the same tokens before: in `batch`, the response, its prompt and its group; in `epochs`,
    also earlier responses to the prompt. null: off."""
    n_workers: int = setting(0, range=ZERO_OR_MORE)
    """Workers that only generate, each on a device of its own, while those of `trainer` only train; 0: the same workers
    do both."""
    oversample: float = setting(0.0, range=ZERO_OR_MORE)
    """Long tails: keep this share of a step's prompts under way beyond what `trainer.max_staleness` allows, and train
    the first groups that are whole. Others are trained later, or dropped and asked for again once they are too old:
    this prefers short responses. Needs partial rollout; see docs/asynchronous.md."""
    colocated_workers: int = setting(0, range=ZERO_OR_MORE)
    """How many of the workers that train also generate: the first so many; 0: all of them."""
    weight_sync: str = setting("auto", choices=("auto", "ipc", "nccl", "gloo", "ray"), idle=_COLOCATED)
    """How weights reach workers that only generate: `ipc` (shared memory of a machine or of a GPU), `nccl` (from GPU to
    GPU), `gloo` (over TCP), `ray` (Ray's object store), or `auto`: the first of these that serves all of them."""
    update_weights_bucket_megabytes: int = setting(256, range=ONE_OR_MORE, idle=_COLOCATED)
    """MiB of weights that are sent to those workers at once; sender and receiver hold up to two such buckets."""
    tensor_model_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Neighbouring workers that hold one rollout engine, each a part of the model's heads and feed-forward columns and
    its cache (`native`, `vllm`)."""
    gpu_memory_utilization: float | None = setting(
        None,
        range=POSITIVE_SHARE,
        idle=(ON_CPU, ".name is hf, which reserves no memory", _SERVER, ".kv_cache_gb is set"),
    )
    """Share of the device's memory for the engine; null lets the memory plan choose."""
    multi_turn: dict[str, Any] = field(default_factory=dict)
    """Responses of several turns, in which the model calls tools: `multi_turn=True tools=[calculator]`; what else
    there is to set stands in docs/tools.md."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the rollout engine's own, under its name (`engine_kwargs.vllm`); docs/rollout.md says which."""
    agent: dict[str, Any] = field(default_factory=dict)
    """A function of your own that leads each conversation: `agent=FILE.py:NAME`; what else there is to set stands in
    docs/own_agent.md."""
    server: ServerConfig = field(default_factory=ServerConfig)
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
