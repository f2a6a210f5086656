"""The ledger: what a client sends back keeps the token ids that were sampled, however it spells them."""

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
from posttrain.conversations.ledger import Ledger
from posttrain.conversations.serving import openai_chat
from posttrain.conversations.serving.turns import TurnStream
from posttrain.conversations.thinking import EarlierThinking
from posttrain.rollout.base import Output
from tests.serving.scripted_server import END, TOOL, served
from tests.tools.call_templates import tokenizer_of

# Spaces that JSON does not need: rendered again, the call would have other tokens.
CALLS = '<think>hm</think>\n<tool_call>\n{"name":"add", "arguments":{"b":2,"a":1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": TOOL}]
ASK = {"role": "user", "content": "1+2?"}


class Talk:
    """A client and a model that writes what it is told to; `ids` are those that were sampled last."""

    def __init__(self, family: str = "Qwen2.5", template: str = "") -> None:
        tokenizer = tokenizer_of(family)
        tokenizer.chat_template = template or tokenizer.chat_template
        self.model = served(tokenizer)
        self.ledger = Ledger(self.model)

    def ask(self, messages, *said, **more):
        """(the prompt's ids, the messages of the answers)."""
        request = openai_chat.read({"messages": copy.deepcopy(messages), "tools": TOOLS, "n": len(said), **more})
        pending = self.model.begin(request, self.ledger)
        (prompt,) = pending.prompts
        answers = []
        for index, text in enumerate(said):
            self.ids = self.model.template.tokenizer(text + END, add_special_tokens=False)["input_ids"]
            stream = TurnStream(self.model._reader(request, prompt.ids), index)
            delta = stream.finish(Output(index, self.ids, [0.0] * len(self.ids), "stop"))
            self.ledger.add(prompt, request, delta.choice)
            pending.answer.choices.append(delta.choice)
            answers.append(openai_chat._choice(request, pending.answer, delta.choice)["message"])
        self.ledger.deliver(pending.answer)
        return prompt.ids, answers

    def counts(self):
        return self.ledger.continued, self.ledger.opened, self.ledger.changed


def result(id="call00000", text="3"):
    return {"role": "tool", "tool_call_id": id, "content": text}


def as_given(message):
    return message


def by_hand(message):
    """Thinking is dropped, and arguments are spelled anew."""
    call = message["tool_calls"][0]
    arguments = json.dumps(dict(sorted(json.loads(call["function"]["arguments"]).items())), indent=1)
    calls = [{**call, "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def dumped(message):
    return {**message, "annotations": None, "audio": None, "function_call": None, "content": None}


@pytest.mark.parametrize("client", [as_given, by_hand, dumped])
def test_a_turn_that_comes_back_keeps_its_tokens(client):
    talk = Talk()
    first, (message,) = talk.ask([ASK], CALLS)
    before = [*first, *talk.ids]
    second, _ = talk.ask([ASK, client(message), result()], "3")
    assert second[: len(before)] == before and talk.counts() == (1, 1, 0)
    behind = talk.model.template.tokenizer.decode(second[len(before) :], skip_special_tokens=False)
    assert "<tool_response>\n3\n</tool_response>" in behind and behind.endswith("<|im_start|>assistant\n")


def test_a_turn_that_the_client_changed_begins_a_branch_and_is_counted():
    talk = Talk()
    first, (message,) = talk.ask([ASK], CALLS)
    changed = by_hand(message)
    changed["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 9}'
    second, _ = talk.ask([ASK, changed, result()], "3")
    assert second[: len(first)] == first and second[: len(first) + len(talk.ids)] != [*first, *talk.ids]
    assert talk.counts() == (0, 2, 1)


def test_another_history_is_another_root_and_no_change():
    talk = Talk()
    talk.ask([ASK], "3")
    talk.ask([{"role": "user", "content": "You are a sub-agent."}], "yes")
    assert talk.counts() == (0, 2, 0)


def test_other_tools_begin_another_prompt():
    talk = Talk()
    _, (message,) = talk.ask([ASK], "3")
    before = talk.ids
    prompt, _ = talk.ask([ASK, message, ASK], "4", tools=[])
    assert talk.counts()[1] == 2 and len(before) < len(prompt)


def test_variables_of_the_template_hold_behind_every_turn():
    source = Path(__file__).parents[1] / "tools" / "real_templates" / "Qwen-Qwen3-0.6B.jinja"
    for options, opening in (({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")):
        talk = Talk(template=source.read_text(encoding="utf-8"))
        messages = [ASK]
        for text in ("3", "4", "5"):
            prompt, (message,) = talk.ask(messages, text, chat_template_kwargs=options)
            shown = talk.model.template.tokenizer.decode(prompt, skip_special_tokens=False)
            assert shown.endswith(f"<|im_start|>assistant\n{opening}"), shown
            messages += [message, {"role": "user", "content": "and?"}]
        assert talk.counts() == (2, 1, 0)


def test_the_next_request_says_which_of_several_candidates_was_taken():
    talk = Talk()
    first, (one, two) = talk.ask([ASK], "three", "drei")
    taken = list(talk.ids)
    assert not talk.ledger.unused()
    second, _ = talk.ask([ASK, two, ASK], "4")
    assert second[: len(first) + len(taken)] == [*first, *taken]
    (unused,) = talk.ledger.unused()
    assert unused.choice.turn.text == one["content"] == "three"


def test_the_same_turn_may_be_continued_twice():
    talk = Talk()
    first, (message,) = talk.ask([ASK], "three")
    before = [*first, *talk.ids]
    for text in ("and 4?", "and 5?"):
        prompt, _ = talk.ask([ASK, message, {"role": "user", "content": text}], "x")
        assert prompt[: len(before)] == before
    assert talk.counts() == (2, 1, 0) and not talk.ledger.unused()


def kimi(number):
    call = f'<|tool_call_begin|>functions.add:{number}<|tool_call_argument_begin|>{{"a": {number}, "b": 2}}'
    return f"<|tool_calls_section_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


@pytest.mark.parametrize("renamed", [False, True])
def test_results_are_shown_with_the_ids_that_the_model_wrote_whatever_the_client_calls_them(renamed):
    talk, messages = Talk("Kimi K2"), [ASK]
    for number in (4, 5):
        prompt, (message,) = talk.ask(messages, kimi(number))
        (call,) = message["tool_calls"]
        assert call["id"] == f"functions.add:{number}"
        if renamed:
            call["id"] = f"toolu_{number}"
        messages += [message, result(call["id"], f"result {number}")]
    prompt, _ = talk.ask(messages, "done")
    text = talk.model.template.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "## Return of functions.add:4\nresult 4" in text and "## Return of functions.add:5\nresult 5" in text
    assert "toolu" not in text and talk.counts() == (2, 1, 0)


def test_results_are_counted_behind_the_calls_of_earlier_turns():
    talk, messages = Talk("Command A"), [ASK]
    call = '<|START_ACTION|>[\n    {"tool_call_id": "%d", "tool_name": "add", "parameters": {"a": %d}}\n]<|END_ACTION|>'
    for number in (0, 1):
        _, (message,) = talk.ask(messages, call % (number, number))
        messages += [message, result(message["tool_calls"][0]["id"], f"result {number}")]
    prompt, _ = talk.ask(messages, "done")
    text = talk.model.template.tokenizer.decode(prompt, skip_special_tokens=False)
    for number in (0, 1):
        assert f'{{"tool_call_id": "{number}", "results": {{"0": "result {number}"}}' in text
    assert talk.counts() == (2, 1, 0)


def test_stripped_thinking_leaves_the_tokens_of_words_and_calls_as_they_were_sampled():
    """Qwen3's template keeps thinking while tools answer, and drops it once the user speaks."""
    talk = Talk(template=(Path(__file__).parents[1] / "tools/real_templates/Qwen-Qwen3-0.6B.jinja").read_text())
    talk.model.thinking = EarlierThinking.of(talk.model.template)
    messages = [ASK]
    _, (said,) = talk.ask(messages, CALLS)
    sampled = talk.ids
    messages += [said, result()]
    kept, (said,) = talk.ask(messages, "<think>\nso\n</think>\n\nIt is 3.")
    assert any(kept[at : at + len(sampled)] == sampled for at in range(len(kept))), "with its thinking"
    messages += [said, {"role": "user", "content": "sure?"}]
    prompt, (said,) = talk.ask(messages, "<think>yes</think>Yes.")
    text = talk.model.template.tokenizer.decode(prompt)
    call = CALLS.partition("</think>\n")[2]
    assert "<think>" not in text and call in text, "a call with the spaces that the model wrote"
    assert text.endswith(
        "<|im_start|>assistant\nIt is 3.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt, _ = talk.ask([*messages, said, {"role": "user", "content": "more"}], "ok")
    text = talk.model.template.tokenizer.decode(prompt)
    assert "<think>" not in text and "assistant\nYes.<|im_end|>" in text and call in text
    assert talk.counts() == (3, 1, 0) and not talk.ledger.unused()
