"""Sections `actor_rollout_ref.rollout`, `custom_reward_function`, `reward` and `reward_model`: how responses are
generated, what scores them, and with which limits."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.schema import Section, section
from posttrain.config.trainer import NO_VALIDATION, ON_CPU, WITHOUT_RAY, OffloadConfig, rollout_workers_of
from posttrain.settings import (
    COUNT_OR_ALL,
    DTYPES,
    GROUP,
    LARGEST_SCORE,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_SHARE,
    PROCESSES,
    SCORE,
    SECONDS,
    SHARE,
    ZERO_OR_MORE,
    Idle,
    Range,
    at_least,
    setting,
)

_GREEDY = (".do_sample is False", NO_VALIDATION)
_SERVER = ".name is server, where it is an option of `posttrain serve`"
_NO_SERVER = "actor_rollout_ref.rollout.name is not server"
_COLOCATED = Idle("the workers that generate also train", lambda config: not rollout_workers_of(config))
_WAVES = (".name is hf, which decodes in waves", _SERVER)
# With these values responses are sampled from the whole policy, of which log-probs are.
UNFILTERED = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


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
    max_num_batched_tokens: int | None = setting(None, range=ONE_OR_MORE, idle=_WAVES)
    """Tokens computed in one step of the engine; longer prompts are computed in pieces. null is 16384 on a GPU, which
    fewer would leave waiting for the host, and 8192 elsewhere."""
    kv_cache_gb: float | None = setting(None, range=POSITIVE, idle=_WAVES)
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
    weight_sync: str = setting("auto", idle=_COLOCATED)
    """How weights reach workers that only generate: `ipc` (shared memory of a machine or of a GPU), `nccl` (from GPU to
    GPU), `gloo` (over TCP), `ray` (Ray's object store), one of your own, or `auto`: the first that serves all."""
    update_weights_bucket_megabytes: int = setting(256, range=ONE_OR_MORE, idle=_COLOCATED)
    """MiB of weights that are sent to those workers at once; sender and receiver hold up to two such buckets."""
    tensor_model_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Neighbouring workers that hold one rollout engine, each a part of the model's heads and feed-forward columns and
    its cache (`native`, `vllm`)."""
    pipeline_model_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Stages of a rollout engine, each of which holds some of the layers (`vllm`). An engine then has
    `tensor_model_parallel_size` workers for each stage."""
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

    @property
    def engine_size(self) -> int:
        """Workers that hold one engine."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


FACTOR = Range(lambda value: 0 < value <= LARGEST_SCORE, f"above 0 and at most {LARGEST_SCORE:g}")


@section
class SandboxConfig(Section):
    """Limits of one program. Example: `reward.sandbox.timeout_s=2 reward.sandbox.memory_mb=256`."""

    mode: str = setting("kernel", choices=("kernel", "unsafe"))
    """`kernel` isolates programs by namespaces and a filter of system calls; `unsafe` runs them with your rights."""
    timeout_s: float = setting(5.0, range=SECONDS)
    """Seconds that a program may take for all of its tests together."""
    memory_mb: int = setting(512, range=at_least(16))
    """Memory that a program may allocate, all of its processes together."""
    processes: int = setting(16, range=ONE_OR_MORE)
    """Processes and threads that a program may have at a time."""
    disk_mb: int = setting(64, range=ONE_OR_MORE)
    """Size of all files that a program may write; they lie in memory and are gone with it."""
    output_kb: int = setting(1024, range=ONE_OR_MORE)
    """What a program may write to its standard output and error before it is ended."""


@section
class CustomRewardConfig(Section):
    """Your own reward. Example: `custom_reward_function.path=my_reward.py`."""

    path: str | None = setting(None, is_path=True)
    """A Python file, a dotted path to a module or function, or a URL; null scores by `data_source`."""
    name: str | None = setting(None, idle=".path is not set")
    """Function in that file; null takes `compute_score`, or the only public function."""
    reward_kwargs: dict[str, Any] = setting(factory=dict, idle=".path is not set")
    """Further keyword arguments of the function."""


@section
class OverlongBufferConfig(Section):
    """A penalty on training responses that come near the length limit (DAPO)."""

    enable: bool = False
    """Take the penalty from the score."""
    len: int | None = setting(None, range=ONE_OR_MORE, idle=".enable is False")
    """Tokens before the limit over which the penalty grows; null takes a fifth of `data.max_response_length`."""
    penalty_factor: float = setting(1.0, range=FACTOR, idle=".enable is False")
    """Penalty of a response at the limit."""


@section
class RewardPartConfig(Section):
    """One of several rewards. Example: `+reward.functions.form.tags=[think,answer] +reward.functions.form.weight=0.2`.

    It has at most one of path, data_source, tags, pattern and the lengths; with none of them rows are scored by
    their `data_source`.
    """

    weight: float = 1.0
    """What the score is multiplied by; below 0 it is a penalty."""
    needs: str | None = None
    """Another function: this one counts only where that one found the response right."""
    path: str | None = None
    """As in `custom_reward_function`: a file, a dotted path or a URL."""
    name: str | None = None
    """Function in that file."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""
    data_source: str | None = None
    """A built-in scorer for all rows, whatever their own source."""
    tags: list[str] | None = None
    """1 if the response consists of these tags, in their order."""
    pattern: str | None = None
    """1 if this regular expression is found in the response."""
    min_tokens: int | None = None
    """Responses shorter than this score less than 1."""
    free_tokens: int | None = None
    """Responses longer than this score less than 1."""
    max_tokens: int | None = None
    """Responses of this length or longer score 0."""


@section
class RewardConfig(Section):
    """Several rewards, and limits on scoring, which runs in worker processes."""

    functions: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name, summed with their weights; empty takes `custom_reward_function`, or the data source."""
    num_workers: int | None = setting(None, range=PROCESSES)
    """Worker processes on each machine; null takes one per core, at most 8."""
    on_all_machines: bool = setting(True, idle=WITHOUT_RAY)
    """Score on every machine of the run's Ray that has cores; false keeps reward workers on the driver's."""
    timeout_s: float = setting(10.0, range=SECONDS)
    """Seconds that the scoring of one response (or one group) may take."""
    failure_score: float = setting(0.0, range=SCORE)
    """Score of a response whose reward raised, hung or was not a finite number."""
    code_partial_credit: bool = False
    """Give a program the share of tests that it passes, instead of 1.0 for all of them and 0.0 otherwise."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@section
class RewardModelModelConfig(Section):
    """Which model scores, and how conversations reach it."""

    path: str | None = setting(None, is_path=True)
    """Folder or hub id: a sequence classifier with one label, or a causal language model with a value head."""
    tokenizer_path: str | None = setting(None, is_path=True)
    """Folder or hub id of its tokenizer and chat template, if they do not lie with the model."""
    input_tokenizer: str | None = setting(None, is_path=True)
    """Tokenizer that wrote the responses: if set, conversations are always decoded by it and rendered anew; null takes
    the policy's, and does so only where vocabulary or chat template differ."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    dtype: str = setting("auto", choices=DTYPES)
    """Compute type of its weights, as for the policy."""


@section
class RewardModelConfig(Section):
    """A reward model. Example: `reward_model.enable=True reward_model.model.path=weqweasdas/RM-Gemma-2B`."""

    enable: bool = False
    """Load the model and let its scores be rewards."""
    n_workers: int = setting(0, range=ZERO_OR_MORE, idle=".enable is False")
    """Workers of its own, each with the whole model on a device of its own: they score groups while others are still
    generated; 0: it is on the workers that train."""
    weight: float = 1.0
    """What the model's score is multiplied by."""
    function_weight: float | None = None
    """What the reward function's score is multiplied by before it is added; null takes 1 if a function is named
    (`custom_reward_function`, `reward.functions`), else 0, so that it is only recorded."""
    micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most conversations in one forward pass of a worker; null fills the token budget."""
    forward_max_token_len_per_gpu: int = setting(16384, range=ONE_OR_MORE)
    """Token budget of one packed forward pass of a worker."""
    max_length: int | None = setting(None, range=at_least(2))
    """Most tokens of a conversation; null takes what the model was made for."""
    truncation: str = setting("left", choices=("left", "right", "error"))
    """Which end of a longer one is cut: `left` keeps the response, `right` the prompt; `error` stops the run."""
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    fsdp_config: OffloadConfig = field(default_factory=OffloadConfig)
