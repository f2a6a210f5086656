"""A small SGLang: the part of its interface that the engine uses, decoding with transformers one row at a time.

It has what makes the real one difficult: weights of its own that begin wrong, prompts that are remembered until the
cache is flushed, weights that are taken only between the begin and the end of an update, an abort that takes every
request whose name begins as the one that is named, and tokens that are made ahead of whoever takes them. What posttrain
puts into its process, the sampler and the scale of scores, is posttrain's own here, too.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.rollout.sglang import inside
from posttrain.rollout.sglang.settings import SGLANG

ARGUMENTS = {
    *("model_path", "dtype", "device", "base_gpu_id", "context_length", "max_running_requests", "max_total_tokens"),
    *("chunked_prefill_size", "max_prefill_tokens", "mem_fraction_static", "enable_memory_saver", "log_level"),
    *("enable_weights_cpu_backup", "attention_backend", "page_size", "schedule_policy"),
    *SGLANG.fixed,
}
"""Of `ServerArgs`: what posttrain gives, and some that users do."""


@dataclass
class Req:
    """A request as SGLang's scheduler has it."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    aborted: bool = False


class Engine:
    """Of `sglang.srt.entrypoints.engine`. Its scheduler is here, not in a process of its own."""

    made: list[Engine] = []  # noqa: RUF012
    run_scheduler_process_func: Any = None

    def __init__(self, **kwargs: Any) -> None:
        assert {*kwargs} <= ARGUMENTS, {*kwargs} - ARGUMENTS
        self.args, self.loop = SimpleNamespace(**kwargs), asyncio.new_event_loop()
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(kwargs["model_path"])
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.eos, self.head = config.eos_token_id, 1.0
        self.remembered: dict[tuple[int, ...], torch.Tensor] = {}
        self.asked: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.running: dict[str, Req] = {}
        self.updating = self.late = False
        buffers = [torch.zeros(64)]
        cache = SimpleNamespace(k_buffer=buffers, v_buffer=[torch.zeros(32)])
        self.scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache))
        self.tokenizer_manager = SimpleNamespace(
            abort_request=self._abort, flush_cache=self._flush, _subprocess_watchdog=None
        )
        inside_of(self).install()
        Engine.made.append(self)

    def shutdown(self) -> None:
        raise AssertionError("it would end every child of this process")

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": self.args.max_total_tokens}

    # -- requests -------------------------------------------------------------------------------------------------
    async def async_generate(
        self,
        *,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        rid: str,
        return_logprob: bool,
        stream: bool,
    ) -> Any:
        assert return_logprob and stream
        return self._streamed(self._new(rid, input_ids, sampling_params))

    def _new(self, rid: str, input_ids: list[int], sampling_params: dict[str, Any]) -> Req:
        assert len(input_ids) + sampling_params["max_new_tokens"] <= self.args.context_length
        self.asked.append(sampling_params)
        told = {"stop_token_ids": [], **sampling_params}
        return Req(rid, [*input_ids], SimpleNamespace(**told))

    async def _streamed(self, req: Req) -> Any:
        """Two tokens are told at once where two are left: more than whoever takes them one by one has asked for."""
        self.running[req.rid] = req
        reason, ended = None, 0
        while reason is None:
            news = []
            while reason is None and len(news) < 2:
                news.append(self._advance(req))
                reason = self._ended(req)
            ended += len(news)
            yield self._told(req, news, reason)
            await asyncio.sleep(0)
        del self.running[req.rid]

    def _ended(self, req: Req) -> dict[str, Any] | None:
        if req.aborted:
            return {"type": "abort"}
        if req.output_ids[-1] in (*req.sampling_params.stop_token_ids, self.eos):
            return {"type": "stop"}
        whole = len(req.output_ids) == req.sampling_params.max_new_tokens
        return {"type": "length"} if whole else None

    def _told(self, req: Req, news: list[tuple[int, float, float]], reason: Any) -> dict[str, Any]:
        assert self.args.incremental_streaming_output
        more = {"output_token_logprobs": [(p, token, None) for token, p, _ in news], "finish_reason": reason}
        more[inside.DRAWN] = [drawn for _, _, drawn in news]
        return {"output_ids": [token for token, _, _ in news], "meta_info": more}

    @torch.no_grad()
    def _advance(self, req: Req) -> tuple[int, float, float]:
        assert self.scheduler.token_to_kv_pool_allocator.get_kvcache().k_buffer[0].untyped_storage().nbytes()
        ids = (*req.origin_input_ids, *req.output_ids)
        hidden = self.remembered.setdefault(ids, self._hidden(ids)[-1])
        batch = ForwardBatch.init_new(SimpleNamespace(reqs=[req]))
        output = SimpleNamespace(next_token_logits=self.get_logits(hidden[None]))
        sampler = own["sampler"]()
        (token,) = sampler.forward(output, batch.sampling_info, True).tolist()
        req.output_ids.append(token)
        return token, float(output.next_token_logprobs[0]), output.customized_info[inside.DRAWN][0]

    def _hidden(self, ids: Any) -> torch.Tensor:
        return self.model.model(torch.tensor([[*ids]])).last_hidden_state[0]

    def get_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return LogitsProcessor()._get_logits(self.head * self.model.lm_head(hidden))

    @torch.no_grad()
    def generate(
        self, *, input_ids: list[list[int]], sampling_params: Any, return_logprob: bool, logprob_start_len: int
    ):
        assert return_logprob and logprob_start_len == 0 and sampling_params["max_new_tokens"] == 1
        made = []
        for ids in input_ids:
            req = self._new("scored", ids, sampling_params)
            self._advance(req)
            log_p = self.get_logits(self._hidden(ids)).log_softmax(-1)
            rows = [(float(p[token]), token, None) for token, p in zip(ids[1:], log_p, strict=False)]
            made.append({"meta_info": {"input_token_logprobs": [(None, ids[0], None), *rows]}})
        return made

    def _abort(self, rid: str) -> None:
        self.late = True
        for name, req in self.running.items():
            req.aborted |= name.startswith(rid)

    # -- weights and memory ---------------------------------------------------------------------------------------
    def begin_weight_update(self) -> tuple[bool, str]:
        assert not self.running, "it would wait for them"
        self.updating = True
        return True, ""

    def update_weights_from_tensor(self, named_tensors: Any, *, flush_cache: bool) -> tuple[bool, str]:
        if not self.updating:
            return False, "must run between begin_weight_update() and end_weight_update()"
        state = self.model.state_dict()
        for name, weight in named_tensors:
            state[name].copy_(weight)
        self.calls.append(len(named_tensors))
        return True, ""

    def end_weight_update(self) -> tuple[bool, str]:
        self.updating = False
        return True, ""

    async def _flush(self, timeout_s: float | None = None) -> Any:
        """A moment after the last abort there is still something; without time it is not waited for."""
        if timeout_s:
            self.late = False
        if done := not (self.running or self.late):
            self.remembered.clear()
        return SimpleNamespace(success=done)

    def release_memory_occupation(self, tags: list[str]) -> None:
        assert not self.running and not self.late, "it ends where it is not idle"
        self.calls.append(("release", *tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(("resume", *tags))

    def collective_rpc(self, method: str) -> None:
        getattr(Scheduler, method)(self.scheduler)


own: dict[str, Any] = {}


class Sampler:
    pass


class Scheduler:
    pass


class ForwardBatch:
    @classmethod
    def init_new(cls, batch: Any) -> Any:
        return SimpleNamespace(sampling_info=SimpleNamespace())


class LogitsProcessor:
    def _get_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def inside_of(engine: Engine) -> Any:
    """What runs in SGLang's own process; there the engine's function begins with it."""
    assert engine.run_scheduler_process_func is inside.run_scheduler
    return inside


def install(monkeypatch: Any) -> type[Engine]:
    """`import sglang` gives this one until the test ends, and what an engine sets in the environment ends with it."""
    Engine.made = []
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
        monkeypatch.setenv(name, "")  # only what it has set does it take back
        monkeypatch.delenv(name)
    for kind in (Scheduler, ForwardBatch, LogitsProcessor):
        for name, value in {**vars(kind)}.items():
            if not name.startswith("__"):
                monkeypatch.setattr(kind, name, value)  # as it is now, when the test has ended
    monkeypatch.setattr(inside, "_SCALE", [1.0])
    register = lambda name, factory: own.update(sampler=factory)  # noqa: E731
    parts = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": {"Engine": Engine},
        "sglang.srt.layers": {},
        "sglang.srt.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "sglang.srt.layers.sampler": {"Sampler": Sampler, "register_sampler_backend": register},
        "sglang.srt.managers": {},
        "sglang.srt.managers.scheduler": {"Scheduler": Scheduler},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(SGLANG.__class__, "installed_arguments", lambda self: {*ARGUMENTS})
    return Engine
