"""Names around rollouts: tool parsers, traces, limits on rewards, resource pools, counted operations."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop, shortened
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.experimental.reward_loop.reward_manager.limited import AsyncTokenBucket, RateLimitedRewardManager
from verl.single_controller.ray.base import RayResourcePool, merge_resource_pool, split_resource_pool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op


class Texts:
    """A tokenizer whose tokens are characters."""

    pad_token = "<pad>"

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        return len(token)


def _parsed(name: str, text: str, tools: Any = None) -> tuple[str, list[tuple[str, str, str | None]]]:
    parser = ToolParser.get_tool_parser(name, Texts())
    words, calls = asyncio.run(parser.extract_tool_calls([ord(one) for one in text], tools))
    return words, [(call.name, call.arguments, call.tool_call_id) for call in calls]


def _tool(name: str, **kinds: str) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    function = {"name": name, "description": "", "parameters": parameters | {"required": list(kinds)[:1]}}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def test_each_family_of_models_has_its_parser() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert _parsed("hermes", f"Hi {call} bye") == ("Hi  bye", [("f", '{"a": 1}', None)])
    assert _parsed("hermes", "<tool_call>oops</tool_call>x") == ("x", [])
    quoted = "<|channel|>analysis<|message|>maybe to=functions.g<|call|><|end|>"
    harmony = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert _parsed("gpt-oss", f"{quoted}{harmony}<pad>") == ("", [("f", '{"a": 1}', None)])
    tools = [_tool("f", n="integer", x="number", b="boolean", s="string", o="object")]
    values = {"n": "3", "x": "2.0", "b": "True", "s": "3", "o": '{"k": null}'}
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    expected = '{"n": 3, "x": 2, "b": true, "s": "3", "o": {"k": null}}'
    text = f"Go<tool_call>\n<function=f>\n{given}</function>\n</tool_call>"
    assert _parsed("qwen3_coder", text, tools) == ("Go", [("f", expected, None)])
    glm = "<think>t</think>W<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>"
    assert _parsed("glm", glm) == ("W", [("f", '{"a": 1}', None)])
    assert ToolParser.get_tool_parser("glm", Texts()).stop_token_ids == [len("<|observation|>")]


def test_a_kimi_call_keeps_its_id_and_finds_its_tool() -> None:
    tools = [_tool("get_weather", city="string"), _tool("search", query="string")]
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ids = ["functions.search:0", "call-get_weather-1", "x2"]
    calls = "".join(f'{begin}{one}{middle}{{"city": "B"}}{end}' for one in ids)
    words, found = _parsed("kimi", f"Let<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>", tools)
    names = ["search", "get_weather", "get_weather"]  # by name, by a part of the id, by the argument it requires
    assert words == "Let" and found == [(name, '{"city": "B"}', one) for name, one in zip(names, ids, strict=True)]


def test_a_tool_that_fails_answers_with_what_was_wrong() -> None:
    class Tool:
        async def create(self, create_kwargs: Any = None) -> tuple[str, None]:
            return "1", None

        async def execute(self, instance_id: str, parameters: Any, **more: Any) -> Any:
            if parameters:
                raise RuntimeError("no database")
            return SimpleNamespace(text="abcdefghij", image=None, video=None), 1.0, {}

        async def release(self, instance_id: str) -> None: ...

    loop = MagicMock(spec=ToolAgentLoop)
    loop.tools, loop.max_tool_response_length, loop.tool_response_truncate_side = {"f": Tool()}, 4, "left"

    def answer(name: str, arguments: Any) -> tuple[str, float]:
        call = FunctionCall(name, arguments)
        response, reward, _ = asyncio.run(ToolAgentLoop._call_tool(loop, call, {}, MagicMock()))
        return response.text or "", reward or 0.0

    assert answer("f", "{}") == ("(truncated)...ghij", 1.0)
    assert answer("g", "{}")[0].startswith("Unknown function 'g'")
    assert answer("f", None)[0].startswith("Invalid JSON in arguments for 'f'")
    assert answer("f", '{"a": 1}') == ("Error executing tool 'f': no database", 0.0)
    assert shortened("abcdefghij", 4, "right") == "abcd...(truncated)"
    assert shortened("abcdefghij", 4, "middle") == "ab...(truncated)...ij"


@pytest.fixture
def weave(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake, contexts = MagicMock(), MagicMock()
    contexts.call_context.call_attributes.get.return_value = {"step": 3}
    modules = {"weave": fake, "weave.trace": MagicMock(), "weave.trace.context": contexts}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    RolloutTraceConfig.reset()


class Traced:
    tokenizer = Texts()

    @rollout_trace_op
    async def turn(self, prompt_ids: list[int], limit: int = 5) -> dict[str, Any]:
        if limit < 0:
            raise ValueError("no room")
        return {"token_ids": [104, 105]}

    @rollout_trace_op
    def plain(self, word: str) -> str:
        return word * 2


def test_calls_are_sent_to_the_backend_that_was_named(weave: Any) -> None:
    assert Traced().plain("a") == "aa"  # without a backend: the method alone
    RolloutTraceConfig.init("project", "experiment", "weave", token2text=True)
    RolloutTraceConfig.init("other", "other", "mlflow")  # the first one stays
    client = weave.init.return_value
    assert RolloutTraceConfig.get_client() is client and RolloutTraceConfig.get_backend() == "weave"
    with rollout_trace_attr(sample_index=1, step=3, rollout_n=0):
        assert asyncio.run(Traced().turn([111])) == {"token_ids": [104, 105]}
    weave.attributes.assert_called_once_with(
        {"sample_index": 1, "step": 3, "rollout_n": 0, "validate": False, "experiment_name": "experiment"}
    )
    client.create_call.assert_called_once_with(
        op="Traced.turn", inputs={"prompt_ids": [111], "limit": 5}, attributes={"step": 3}
    )
    texts = {"token_ids": [104, 105], "prompt_text": "o", "response_text": "hi"}
    client.finish_call.assert_called_once_with(client.create_call.return_value, output=texts)
    with pytest.raises(ValueError, match="no room") as failed:
        asyncio.run(Traced().turn([1], limit=-1))
    client.finish_call.assert_called_with(client.create_call.return_value, exception=failed.value)
    with rollout_trace_attr(trace=False):
        Traced().plain("a")
    assert client.create_call.call_count == 2


def _row(text: str, truth: str) -> DataProto:
    ids = torch.tensor([[ord(one) for one in text]])
    tensors = {"prompts": ids[:, :0], "responses": ids, "attention_mask": torch.ones_like(ids)}
    facts = {"data_source": np.array(["s"], dtype=object), "reward_model": np.array([{"ground_truth": truth}])}
    return DataProto.from_dict(tensors, non_tensors=facts)


async def _equal(solution_str: str, ground_truth: str, **more: Any) -> float:
    if ground_truth == "slow":
        await asyncio.sleep(60)
    if ground_truth == "broken":
        raise ValueError("no server")
    return float(solution_str == ground_truth)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(RateLimitedRewardManager, "_class_initialized", False)
    yield RateLimitedRewardManager
    RateLimitedRewardManager._class_initialized = False


def test_a_reward_that_fails_or_is_late_scores_zero(limited: Any) -> None:
    from omegaconf import OmegaConf

    async def score(*truths: str) -> list[dict[str, Any]]:
        config = OmegaConf.create({"reward": {"max_concurrent": 2, "timeout": 0.05}})
        manager = limited(config, Texts(), _equal)
        return [await manager.run_single(_row("a", truth)) for truth in truths]

    right, late, broken = asyncio.run(score("a", "slow", "broken"))
    assert right["reward_score"] == 1.0
    assert (late["reward_score"], late["reward_extra_info"]["timeout"]) == (0.0, True)
    assert (broken["reward_score"], broken["reward_extra_info"]["error"]) == (0.0, "no server")
    assert limited._max_concurrent == 2


def test_a_bucket_lets_tokens_through_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def take() -> None:
        clock = SimpleNamespace(now=0.0)

        async def sleep(seconds: float) -> None:
            waited.append(seconds)
            clock.now += seconds

        loop = SimpleNamespace(time=lambda: clock.now)
        fake = SimpleNamespace(Lock=asyncio.Lock, sleep=sleep, get_running_loop=lambda: loop)
        monkeypatch.setattr("verl.experimental.reward_loop.reward_manager.limited.asyncio", fake)
        bucket = AsyncTokenBucket(rate_limit=10.0)
        for tokens in (4.0, 6.0, 5.0, 30.0):
            await bucket.acquire(tokens)

    asyncio.run(take())
    assert waited == pytest.approx([0.5, 3.0])  # 10 at once; 5 and then 30 more at 10 per second


def test_a_pool_is_split_and_merged() -> None:
    pool = RayResourcePool([2, 3], use_gpu=False, name_prefix="p")
    parts = split_resource_pool(pool, [1, 4])
    assert [part.world_size for part in parts] == [1, 4] and parts[1].local_rank_list() == [1, 0, 1, 2]
    again = split_resource_pool(parts[1], 2)
    assert [part.start_bundle_index for part in again] == [1, 3] and again[1].local_world_size_list() == [3, 3]
    assert merge_resource_pool(pool, RayResourcePool([1], use_gpu=False)).store == [2, 3, 1]
    with pytest.raises(AssertionError, match="divisor"):
        split_resource_pool(pool, 2)


def test_operations_are_counted_by_parameters_and_attention() -> None:
    shape = dict(vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    dense = SimpleNamespace(model_type="qwen2", intermediate_size=16, **shape)
    # A layer: queries and output 8x8 each, keys and values 8x4 each, three matrices of 8x16.
    parameters = 2 * (2 * 64 + 2 * 32 + 3 * 128) + 2 * 10 * 8
    attention = 6 * (3**2 + 5**2) * 4 * 2 * 2
    reached, promised = FlopsCounter(dense).estimate_flops([3, 5], 0.5)
    assert reached == pytest.approx((6 * parameters * 8 + attention) / 0.5 / 1e12) and promised > 0
    experts = SimpleNamespace(model_type="qwen3_moe", moe_intermediate_size=4, num_experts=6, num_experts_per_tok=2)
    experts.__dict__.update(shape)
    parameters += 2 * (3 * 8 * 4 * 2 + 8 * 6 - 3 * 128)
    assert FlopsCounter(experts).estimate_flops([3, 5], 0.5)[0] == pytest.approx(
        (6 * parameters * 8 + attention) / 0.5 / 1e12
    )
    assert FlopsCounter(SimpleNamespace(model_type="other")).estimate_flops([3], 1.0)[0] == 0
    assert get_device_flops("T", "NVIDIA L40S") == pytest.approx(362.05) and get_device_flops("P", "H200") < 1
