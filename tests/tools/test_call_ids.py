"""Ids of tool calls over several turns: results are shown with the ids of their calls, also where templates count."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from posttrain.conversations.chat import Chat, Setup
from posttrain.conversations.conversation import Conversation, Limits
from posttrain.conversations.format_proof import choose_format
from posttrain.conversations.formats.base import FORMATS, Unreadable
from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.rollout.base import Output
from tests.tools.call_templates import TEMPLATES, tokenizer_of

SCHEMA = {"type": "function", "function": {"name": "add", "description": "The sum.", "parameters": {}}}
ASKED = {"role": "user", "content": "2 + 3?"}
WITH_IDS = ["Kimi K2", "Solar Open", "Mistral 7B v0.3", "Mistral Small 3.2 (v11)"]  # the model writes ids
ENDS = ("<|END_OF_TURN_TOKEN|>", "<|im_end|>", "<|calls|>", "</s>")
COUNTED = ["Command A", "Command R7B"]


def template_of(family: str) -> MessageTemplate:
    template = MessageTemplate(tokenizer_of(family))
    choose_format(template, "auto")
    return template


def turn_of(template: MessageTemplate, first: int, count: int) -> tuple[dict, list[dict]]:
    """(a turn with so many calls, their results), where the first call is the conversation's `first`-th."""
    calls = template.calls
    assert calls is not None
    numbers = range(first, first + count)
    ids = [calls.format.call_id("add", number) for number in numbers]
    said = calls.message([("add", {"a": number}) for number in numbers], ids)
    results = [
        {"role": "tool", "content": f"result {number}", "name": "add", "tool_call_id": id}
        for number, id in zip(numbers, ids, strict=True)
    ]
    return said, results


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("family", TEMPLATES)
def test_results_behind_earlier_calls_are_those_of_the_whole_conversation(family, before):
    template, messages = template_of(family), [ASKED]
    assert template.calls is not None and template.calls.counted == (family in COUNTED)
    for number in range(before):
        said, results = turn_of(template, number, 1)
        messages += [said, *results]
    said, results = turn_of(template, before, 2 if template.calls.several else 1)
    whole = template.render([*messages, said, *results], opens=True, tools=[SCHEMA])
    told = [{key: one[key] for key in ("role", "content", "name")} for one in results]
    behind = template.tokenizer.decode(template.ids(told, -1, before), skip_special_tokens=False)
    assert whole.endswith(behind) and "result" in behind


def lead(template: MessageTemplate, opening: list[dict], said: list[str]) -> str:
    """The text of a conversation in which the model writes this, and its calls are answered by `result N`."""
    tokenizer, answered = template.tokenizer, iter(range(100))
    settings = TurnSettings(format=choose_format(template, "auto")[0], max_parallel_calls=2)
    limits, prompt = Limits(10_000, 10_000), template.prompt(opening, [SCHEMA])
    conversation, turns = Conversation(("0", 0), prompt, 0, {}), iter(said)

    async def ask(wanted):
        if isinstance(wanted, list):
            return [ToolAnswer(f"result {next(answered)}") for _ in wanted]
        ids = tokenizer(next(turns), add_special_tokens=False)["input_ids"]
        output = Output(0, ids, np.zeros(len(ids)), "stop", [(0, len(ids))])
        conversation.branches[wanted.branch].add_sampled(output, conversation.turns)
        conversation.turns += 1
        return output

    async def play() -> str:
        chat = Chat(conversation, opening, Setup(template, limits, settings, [SCHEMA]), ask)
        for _ in said:
            await chat.generate()
            if calls := chat.tool_calls():
                await chat.answer(calls)
        return tokenizer.decode([*chat.ids, *chat._observation_ids()], skip_special_tokens=False)

    return asyncio.run(play())


@pytest.mark.parametrize("given", [0, 2])
@pytest.mark.parametrize("family", [*WITH_IDS, *COUNTED, "Qwen2.5"])
def test_a_conversation_of_several_turns_is_the_one_that_the_template_renders_at_once(family, given):
    """Behind a prompt with so many calls of its own."""
    template, messages, said = template_of(family), [ASKED], list[str]()
    if given:
        first, results = turn_of(template, 0, given)
        answers = [{**one, "content": "4"} for one in results]
        messages += [first, *answers, {"role": "assistant", "content": "It is 4."}, ASKED]
    opening, number = list(messages), given
    for count in (1, 2, 1):
        turn, results = turn_of(template, number, count)
        before = template.render(messages, opens=True, tools=[SCHEMA])
        text = template.render([*messages, turn], opens=False, tools=[SCHEMA])
        rest = text.removeprefix(before)
        end = next(one for one in ENDS if one in rest)
        said.append(rest.partition(end)[0] + end)
        told = [{**one, "content": f"result {number - given + place}"} for place, one in enumerate(results)]
        messages += [turn, *told]
        number += count
    whole = template.render(messages, opens=True, tools=[SCHEMA])
    assert lead(template, opening, said) == whole


def test_ids_of_the_models_own_are_kept_where_they_name_its_calls_and_replaced_where_not():
    kimi, mistral = FORMATS["kimi_k2"], FORMATS["mistral"]
    one, two = ToolCall("add", {}, "functions.add:7"), ToolCall("add", {}, "functions.add:9")
    assert kimi.ids_of([one, two], 3) == ["functions.add:7", "functions.add:9"]
    numbered = ["functions.add:3", "functions.add:4"]
    assert kimi.ids_of([one, one], 3) == numbered, "a client could not tell them apart"
    assert kimi.ids_of([one, ToolCall("add", {})], 3) == numbered
    assert kimi.ids_of([one, Unreadable("?")], 3) == ["functions.add:3", "functions.tool:4"]
    assert kimi.ids_of([ToolCall("add", {}, "a<|im_end|>")], 0) == ["functions.add:0"], "templates do not escape ids"
    assert mistral.ids_of([ToolCall("add", {}, "abc123DEF")], 0) == ["abc123DEF"]
    assert mistral.ids_of([ToolCall("add", {}, "abc123DE")], 5) == ["call00005"], "its templates reject other lengths"
    assert ToolCall("add", {}, "a") == ToolCall("add", {}, "b")


@pytest.mark.parametrize(
    "name, text, ids",
    [
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a:4<|tool_call_argument_begin|>{}<|tool_call_end|>",
            ["functions.a:4"],
        ),
        ("kimi_k2", "<|tool_call_begin|> a <|tool_call_argument_begin|>{}<|tool_call_end|>", ["a"]),
        ("solar_open", "<|tool_call:begin|>x1<|tool_call:name|>a<|tool_call:args|>{}<|tool_call:end|>", ["x1"]),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "q"}, {"name": "b", "id": 3}]', ["q", None]),
        ("mistral", "[TOOL_CALLS]a[CALL_ID]abc[ARGS]{}[TOOL_CALLS]b[ARGS]{}", ["abc", None]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', [None]),
    ],
)
def test_ids_are_read_from_what_the_model_wrote(name, text, ids):
    assert [call.id for call in FORMATS[name].read(text) if isinstance(call, ToolCall)] == ids


def test_a_model_that_counts_in_its_own_way_reads_its_own_ids():
    template = template_of("Kimi K2")
    opening, behind = [ASKED], "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    calls = [f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:{n}{behind}" for n in (5, 0)]
    text = lead(template, opening, calls)
    assert "## Return of functions.add:5\nresult 0" in text and "## Return of functions.add:0\nresult 1" in text
