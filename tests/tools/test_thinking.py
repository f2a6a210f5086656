"""The thinking of earlier turns is dropped as each chat template drops it; words and calls stay the sampled tokens."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from template_round_trips import read_templates, tokenizer_with

from posttrain.conversations.chat import Chat, ChatFull, Setup
from posttrain.conversations.conversation import Conversation, Limits
from posttrain.conversations.format_proof import WrongFormat, choose_format
from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.thinking import EarlierThinking
from posttrain.conversations.tools.base import ToolAnswer
from posttrain.errors import UserError
from posttrain.rollout.base import Output
from tests.tools.call_templates import tokenizer_of

TEMPLATES = read_templates(Path(__file__).parent / "real_templates")
ASKED = {"role": "user", "content": "2 + 3?"}
SCHEMA = {"type": "function", "function": {"name": "add", "description": "The sum.", "parameters": {}}}
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
# (template, variables): the text that only the prompt has, the text that replaces thoughts, dropped behind tools
DROPS = {
    ("GLM-4.6", "on"): ("", "\n<think></think>\n", False),
    ("MiniMax-M2", "on"): ("<think>\n", "", False),
    ("Qwen-QwQ-32B", "on"): ("<think>\n", "", True),
    ("Qwen-QwQ-32B", "off"): ("<think>\n</think>", "", True),
    ("Qwen-Qwen3-0.6B", "on"): ("", "", False),
    ("Qwen-Qwen3-0.6B", "off"): ("<think>\n\n</think>\n\n", "", False),
    ("Qwen3.5-4B", "on"): ("<think>\n", "", False),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "on"): ("<think>\n", "", True),
    ("google-gemma-4-31B-it", "on"): ("", "", True),
}


def template_of(name: str, options: dict[str, Any] | None = None) -> MessageTemplate:
    template = MessageTemplate(tokenizer_with(TEMPLATES[name]), options)
    with suppress(WrongFormat):  # its thinking is dropped all the same
        choose_format(template, "auto")
    return template


@pytest.mark.parametrize(("name", "thinks"), DROPS)
def test_what_stands_in_place_of_a_thought_is_what_the_template_writes(name, thinks):
    template = template_of(name, ON if thinks == "on" else OFF)
    thinking, decode = EarlierThinking.of(template), template.tokenizer.decode
    found = decode(thinking.opened), decode(thinking.shown), thinking.drops_before("tool")
    assert found == DROPS[name, thinks] and thinking.drops_before("user")


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "vllm-hermes", "openai-gpt-oss-120b"])
def test_a_template_without_thinking_between_marks_is_rejected(name):
    with pytest.raises(UserError, match="thinking_in_history=strip: the chat template does not drop the thinking"):
        EarlierThinking.of(template_of(name))


def test_a_template_that_writes_an_earlier_turn_in_another_way_is_rejected():
    with pytest.raises(UserError, match="cannot be written as the chat template writes it"):
        EarlierThinking.of(template_of("vllm-deepseekv31"))


def test_a_run_with_tools_alone_is_rejected_where_the_template_drops_thinking_behind_users_only():
    with pytest.raises(UserError, match=r"strip has no effect: the chat template keeps the thinking .* while tools"):
        EarlierThinking.of(template_of("Qwen-Qwen3-0.6B")).check(only_tools=True)
    EarlierThinking.of(template_of("Qwen-Qwen3-0.6B")).check(only_tools=False)
    EarlierThinking.of(template_of("Qwen-QwQ-32B")).check(only_tools=True)


class Talk:
    """A chat whose model writes these turns; `read` has the text in front of each."""

    def __init__(self, template: MessageTemplate, said: list[str], *, response: int = 10_000, rows: int | None = None):
        self.template, self.read = template, list[str]()
        limits, prompt = Limits(10_000, response, rows), template.prompt([ASKED], [SCHEMA])
        self.conversation, turns = Conversation(("0", 0), prompt, 0, {}), iter(said)

        async def ask(wanted):
            if isinstance(wanted, list):
                return [ToolAnswer("5") for _ in wanted]
            self.read.append(template.tokenizer.decode(wanted.prompt_ids, skip_special_tokens=False))
            ids = template.tokenizer(next(turns), add_special_tokens=False)["input_ids"][: wanted.max_tokens]
            output = Output(0, ids, np.full(len(ids), -float(self.conversation.turns + 1)), "stop", [(0, len(ids))])
            self.conversation.end_request(
                self.conversation.branches[wanted.branch], wanted.prompt_ids, output, kept=wanted.kept
            )
            return output

        setup = Setup(template, limits, TurnSettings(format="hermes"), [SCHEMA], thinking=EarlierThinking.of(template))
        self.chat = Chat(self.conversation, [ASKED], setup, ask)

    def say(self, **how):
        return asyncio.run(self.chat.generate(**how))


def call(number: int) -> dict:
    return {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": number}}}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nthought {}\n</think>\n\n"


def test_contexts_are_those_that_the_template_renders_and_each_token_is_trained_once():
    """A tool call and its result keep their thinking (Qwen3); it is dropped when the user speaks."""
    template, end = template_of("Qwen-Qwen3-0.6B", ON), "<|im_end|>"
    said = [
        f"{THOUGHT.format(1)}{CALL}{end}",
        f"{THOUGHT.format(2)}It is 5.{end}",
        f"{THOUGHT.format(3)}Still 5.{end}",
        f"No thought.{end}",
        f"{THOUGHT.format(4)}Yes.{end}",
    ]
    talk = Talk(template, said)
    talk.say()
    asyncio.run(talk.chat.answer(talk.chat.tool_calls()))
    for text in (None, "sure?", "really?", "why?"):
        if text:
            talk.chat.tell(text)
        talk.say()
    user = [{"role": "user", "content": text} for text in ("sure?", "really?", "why?")]
    messages = [
        ASKED,
        {"role": "assistant", "content": "", "reasoning_content": "thought 1", "tool_calls": [call(1)]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5.", "reasoning_content": "thought 2"},
        user[0],
        {"role": "assistant", "content": "Still 5.", "reasoning_content": "thought 3"},
        user[1],
        {"role": "assistant", "content": "No thought."},
        user[2],
    ]
    wanted = [template.render(messages[:count], opens=True, tools=[SCHEMA]) for count in (1, 3, 5, 7, 9)]
    assert talk.read == wanted
    rows = talk.conversation.rows
    assert [row.turn_ends[-1][0] for row in rows] == [1, 2, 4], "a turn without a thought is followed in its row"
    assert [talk.conversation.parent_row(row)[0] for row in rows] == [None, 0, 1]
    trained = [
        (float(log_prob), token)
        for row in rows
        for log_prob, token, own in zip(np.concatenate(row._log_probs), row._tokens, row.mask, strict=True)
        if own
    ]
    sampled = [
        (-float(number + 1), token)
        for number, text in enumerate(said)
        for token in template.tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    assert trained == sampled
    for row in rows:
        assert not any(
            log_prob for log_prob, own in zip(np.concatenate(row._log_probs), row.mask, strict=True) if not own
        )


@pytest.mark.parametrize("name", ["MiniMax-M2", "GLM-4.6", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"])
def test_marks_that_the_prompt_opens_or_that_stay_empty_are_as_the_template_writes_them(name):
    template = template_of(name, ON)
    opens = "<think>" in template.render([ASKED], opens=True)[-10:]
    end = {"MiniMax-M2": "[e~[", "GLM-4.6": ""}.get(name, "<｜end▁of▁sentence｜>")
    said = [f"thought\n</think>{words}" for words in ("\n\nA.", "B.")]
    talk = Talk(template, [*(f"{'' if opens else '<think>'}{text}{end}" for text in said), "C"])
    messages: list[dict] = [ASKED]
    for text in said:
        talk.say()
        talk.chat.tell("more")
        messages += [{"role": "assistant", "content": f"<think>{text}"}]
        messages += [{"role": "user", "content": "more"}]
    talk.say()
    assert talk.read[2] == template.render(messages, opens=True, tools=[SCHEMA])


def test_thinking_that_did_not_end_is_dropped_whole():
    template = template_of("Qwen-Qwen3-0.6B", ON)
    for said in ("<think>\nand on and on", "<think>\nand on<|im_end|>"):
        talk = Talk(template, [said, "x"])
        talk.say()
        talk.chat.tell("more")
        talk.say()
        assert talk.read[1].endswith(
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_token_that_holds_the_end_of_a_thought_and_words_is_cut():
    """Real vocabularies have tokens such as `>\\n\\n`. Words that share no token with the mark stay as they are."""
    template = MessageTemplate(tokenizer_of("Qwen2.5"))
    template.tokenizer.chat_template = TEMPLATES["Qwen-Qwen3-0.6B"]
    thinking, decode = EarlierThinking.of(template), template.tokenizer.decode
    encode = template.untrusted.encode
    prompt = template.prompt([ASKED])
    for words in ("\n\nSo", "So", "\n\n\nSo it is", " So", "\n", ""):
        turn = encode(f"<think>\nhm\n</think>{words}")
        for odd in (turn, encode("<think>\nhm\n</thi") + encode(f"nk>{words}")):
            made = thinking.drop([*prompt, *odd, 7], [(len(prompt), len(prompt) + len(odd))])
            assert made[: len(prompt)] == prompt and made[-1] == 7
            assert decode(made[len(prompt) : -1]) == words.lstrip("\n")


def test_a_row_too_many_ends_the_conversation_and_its_reason_is_said():
    template = template_of("Qwen-Qwen3-0.6B", ON)
    talk = Talk(template, [f"{THOUGHT.format(1)}A.<|im_end|>"] * 3, rows=2)
    talk.say()
    talk.chat.tell("more")
    talk.say()
    talk.chat.tell("more")
    assert talk.chat.over
    with pytest.raises(ChatFull, match="as many rows as it may"):
        talk.say()
    assert (talk.conversation.stopped_by, len(talk.conversation.rows)) == ("rows", 2)


def test_dropped_thinking_leaves_room_and_a_history_that_fills_a_row_ends_the_conversation():
    template = template_of("Qwen-Qwen3-0.6B", ON)
    turn = f"<think>{'hm ' * 60}</think>A.<|im_end|>"
    talk = Talk(template, [turn] * 9, response=260)
    turns = 0
    while not talk.chat.over:
        talk.say()
        turns += 1
        talk.chat.tell("more" * 3)
    assert 1 < turns < 9, "each turn has 200 tokens, of which 3 stay, with 32 of the user's"
    with pytest.raises(ChatFull, match="no room for a further turn"):
        talk.say()
    assert talk.conversation.stopped_by == "length"
    assert json.dumps([row.number for row in talk.conversation.rows]) == json.dumps(list(range(turns)))
