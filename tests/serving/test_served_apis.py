"""Four APIs and token ids over plain HTTP: what a client sends is sampled, and it gets what was sampled."""

import asyncio
import json
import threading

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from posttrain.conversations.serving import app
from posttrain.conversations.serving.turns import decode
from posttrain.conversations.untrusted_text import UntrustedText
from tests.serving.scripted_server import CALL, END, TOOL, events, with_server
from tests.tools.call_templates import tokenizer_of

ASK = [{"role": "user", "content": "1+2?"}]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CHAT_TOOL = {"type": "function", "function": TOOL}
KWARGS = "chat_template_kwargs"
OWN = {"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}
BODIES = {
    CHAT: {"messages": ASK, "tools": [CHAT_TOOL]},
    RESPONSES: {"input": "1+2?", "tools": [{"type": "function", **TOOL}]},
    MESSAGES: {"model": "m", "max_tokens": 900, "messages": ASK, "tools": [OWN]},
}


def answer_of(script, path, body, **more):
    async def work(client):
        status, answer = await client.post(path, body)
        return status, answer, client.engine.seen

    return with_server(lambda text, seed: script, work, **more)


def test_a_chat_completion_has_text_usage_log_probs_and_the_ids_that_were_sampled():
    body = {"messages": ASK, "n": 2, "logprobs": True, "return_token_ids": True, "max_tokens": 9, "temperature": 0.5}
    status, answer, seen = answer_of(f"three{END}", CHAT, body)
    assert status == 200 and len(answer["choices"]) == 2
    ids = answer["choices"][1]["token_ids"]
    assert len(ids) == 6 and [one["logprob"] for one in answer["choices"][1]["logprobs"]["content"]] == [
        -0.5 - id / 1000 for id in ids
    ]
    assert answer["choices"][1]["message"]["content"] == "three" and answer["choices"][1]["finish_reason"] == "stop"
    prompt = list(seen[0].prompt_ids)
    assert answer["prompt_token_ids"] == prompt == answer["choices"][0]["prompt_token_ids"]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": 12, "total_tokens": len(prompt) + 12,
    }  # fmt: skip
    assert (seen[0].sampling.temperature, seen[0].sampling.max_tokens) == (0.5, 9)
    assert seen[0].seed != seen[1].seed


def test_without_return_token_ids_there_are_none():
    _, answer, _ = answer_of(f"three{END}", CHAT, {"messages": ASK})
    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]


def test_a_seed_repeats_samples_and_each_choice_has_its_own():
    _, _, seen = answer_of(f"x{END}", CHAT, {"messages": ASK, "n": 3, "seed": 5})
    assert sorted(request.seed for request in seen) == [5, 6, 7]


def test_tool_calls_are_read_in_each_api():
    words = f"Let me see.\n{CALL}{END}"
    choice = answer_of(words, CHAT, BODIES[CHAT])[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call00000", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    said, call = answer_of(words, RESPONSES, BODIES[RESPONSES])[1]["output"]
    assert said["content"][0]["text"] == "Let me see." and call["type"] == "function_call"
    assert (call["call_id"], json.loads(call["arguments"])) == ("call00000", {"a": 1, "b": 2})
    answer = answer_of(words, MESSAGES, BODIES[MESSAGES])[1]
    assert answer["stop_reason"] == "tool_use"
    assert answer["content"][1] == {"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 1, "b": 2}}


def test_with_tool_choice_none_a_call_is_text():
    body = {"messages": ASK, "tools": [CHAT_TOOL], "tool_choice": "none"}
    choice = answer_of(f"{CALL}{END}", CHAT, body)[1]["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_thinking_is_apart_from_words_also_where_the_template_opens_it():
    for family, said in (
        ("Qwen2.5", f"<think>\nhm\n</think>\n\n3{END}"),
        ("Qwen3-2507 Thinking", f"hm\n</think>\n3{END}"),
    ):
        message = answer_of(said, CHAT, {"messages": ASK}, family=family)[1]["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "3")
        content = answer_of(said, MESSAGES, BODIES[MESSAGES], family=family)[1]["content"]
        assert [block["type"] for block in content] == ["thinking", "text"]


def test_a_stop_text_ends_the_answer_and_is_not_in_it():
    _, answer, _ = answer_of(f"one. two. three{END}", CHAT, {"messages": ASK, "stop": ["two"]})
    assert answer["choices"][0]["message"]["content"] == "one. "
    body = {"model": "m", "max_tokens": 900, "messages": ASK, "stop_sequences": ["two"]}
    _, answer, _ = answer_of(f"one. two. three{END}", MESSAGES, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")


def test_completions_continue_texts_and_ids_as_they_are():
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 4, "logprobs": 1, "return_token_ids": True}
    _, answer, seen = answer_of(f"<think>x</think>y{END}", TEXT, body)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [4] * 4
    assert answer["choices"][0]["text"] == "<thi" and answer["choices"][0]["finish_reason"] == "length"
    assert [list(request.prompt_ids) for request in seen] == [[64, 65], [64, 65], [66], [66]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[64, 65], [64, 65], [66], [66]]
    _, answer, seen = answer_of(f"y{END}", TEXT, {"prompt": [7, 8, 9]})
    assert list(seen[0].prompt_ids) == [7, 8, 9]


def test_token_ids_in_token_ids_out():
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "logprobs": 1, "stop_token_ids": [70]}}
    _, answer, seen = answer_of(f"abcgh{END}", "/inference/v1/generate", body)
    (choice,) = answer["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert choice["token_ids"][-1] == 70 and list(seen[0].prompt_ids) == [1, 2, 3]


def test_a_stream_has_the_pieces_of_the_answer_and_the_id_of_every_token():
    words = f"Grüße.\n{CALL}{END}"
    body = BODIES[CHAT] | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    _, chunks, seen = answer_of(words, CHAT, body)
    assert chunks[-1] == "[DONE]" and chunks[-2]["usage"]["completion_tokens"] == len(words.encode()) - len(END) + 1
    choices = [chunk["choices"][0] for chunk in chunks[:-2]]
    text = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(text) == "Grüße." and sum(map(bool, text)) > 2
    ids = [id for choice in choices for id in choice.get("token_ids", [])]
    assert len(ids) == chunks[-2]["usage"]["completion_tokens"]
    assert chunks[0]["prompt_token_ids"] == list(seen[0].prompt_ids)
    (calls,) = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
    assert calls[0]["function"]["name"] == "add" and choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_streams_of_items_and_blocks_are_begun_filled_and_ended(path):
    words = f"<think>hm</think>Yes.\n{CALL}{END}"
    _, found, _ = answer_of(words, path, BODIES[path] | {"stream": True})
    kinds = [event["type"] for event in found]
    if path == MESSAGES:
        blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
        assert blocks == ["thinking", "text", "tool_use"] and kinds.count("content_block_stop") == 3
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        text = [one["delta"]["text"] for one in found if one.get("delta", {}).get("type") == "text_delta"]
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        text = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
        assert kinds[-1] == "response.completed"
        items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert "".join(text) == "Yes."


def test_history_is_rendered_alike_from_each_api():
    calls = [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a":1, "b":2}'}}]
    chat = [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}]
    chat += [{"role": "tool", "tool_call_id": "call00000", "content": "3"}]
    items = [{"role": "user", "content": "1+2?"}]
    items += [{"type": "function_call", "call_id": "call00000", "name": "add", "arguments": '{"a":1, "b":2}'}]
    items += [{"type": "function_call_output", "call_id": "call00000", "output": "3"}]
    use = {"type": "tool_use", "id": "call00000", "name": "add", "input": {"a": 1, "b": 2}}
    result = {"type": "tool_result", "tool_use_id": "call00000", "content": [{"type": "text", "text": "3"}]}
    own = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    prompts = [
        answer_of(f"3{END}", CHAT, BODIES[CHAT] | {"messages": chat})[2][0].prompt_ids,
        answer_of(f"3{END}", RESPONSES, BODIES[RESPONSES] | {"input": items})[2][0].prompt_ids,
        answer_of(f"3{END}", MESSAGES, BODIES[MESSAGES] | {"messages": own})[2][0].prompt_ids,
    ]
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize(
    "path, body, words, param",
    [
        (CHAT, {"messages": ASK, "temprature": 1}, "not supported", "temprature"),
        (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 3}, "top_logprobs", "top_logprobs"),
        (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}}, "response_format", "response_format"),
        (CHAT, {"messages": ASK, "temperature": "hot"}, "a number", "temperature"),
        (CHAT, {"messages": ASK, "top_p": 2}, "from 0 to 1", "top_p"),
        (CHAT, {"messages": ASK, "tool_choice": "required", "tools": [CHAT_TOOL]}, "tool_choice", "tool_choice"),
        (CHAT, {"messages": []}, "empty", "messages"),
        (CHAT, {"messages": [{"role": "bot", "content": ""}]}, "role", "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "reads text", "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "maximum context length is 2000", "messages"),
        (TEXT, {"prompt": "a", "echo": True}, "echo", "echo"),
        (TEXT, {"prompt": [10**6]}, "vocabulary", None),
        (TEXT, {"prompt": [True, 2]}, "list of token ids", "prompt"),
        (TEXT, {"prompt": [[3, True]]}, "list of token ids", "prompt"),
        (CHAT, {"messages": ASK, "max_tokens": -(10**400)}, "1 or more", "max_tokens"),
        (CHAT, {"messages": ASK, "seed": 10**400}, "from 0 to", "seed"),
        (CHAT, {"messages": ASK, "temperature": 10**400}, "from 0 to 100", "temperature"),
        (CHAT, {"messages": ASK, "repetition_penalty": float("inf")}, "from 0.01 to 100", "repetition_penalty"),
        (CHAT, {"messages": ASK, "top_k": 2**63}, "top_k", "top_k"),
        (CHAT, {"messages": ASK, "stop_token_ids": [3, -1]}, "vocabulary", "stop_token_ids"),
        (CHAT, {"messages": ASK, "stop_token_ids": [2**70]}, "vocabulary", "stop_token_ids"),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"chat_template": "x"}}, "no variable", KWARGS),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"tokenize": True}}, "no variable", KWARGS),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"opens": True}}, "no variable", KWARGS),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"messages": []}}, "no variable", KWARGS),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "whole input", "previous_response_id"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "web_search", "tools[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_rejected_with_the_fields_name(path, body, words, param):
    status, answer, seen = answer_of(f"x{END}", path, body)
    assert status == 400 and not seen
    assert words in answer["error"]["message"] and answer["error"]["param"] == param


def test_errors_are_in_the_words_of_the_api():
    long = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 3000}]}
    status, answer, _ = answer_of("", MESSAGES, long)
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith("prompt is too long: 30")
    status, answer, _ = answer_of("", CHAT, {"model": "gpt", "messages": ASK})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    status, answer, _ = answer_of("", CHAT, b"{")
    assert status == 400 and "not JSON" in answer["error"]["message"]
    status, answer, _ = answer_of("", "/v1/embeddings", {})
    assert status == 404 and "/v1/embeddings" in answer["error"]["message"]


def test_a_body_that_is_too_large_is_rejected_in_the_words_of_the_api(monkeypatch):
    monkeypatch.setattr("posttrain.conversations.serving.app.LONGEST_BODY", 1000)
    long = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 3000}]}
    status, answer, _ = answer_of("", MESSAGES, long)
    assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")
    status, answer, _ = answer_of("", CHAT, long)
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert "at most 1000 bytes" in answer["error"]["message"]


def test_halves_of_characters_are_replaced():
    # Python and JavaScript send texts with half of a surrogate pair as JSON; no tokenizer takes them.
    for path, body in (
        (CHAT, b'{"messages": [{"role": "user", "content": "a\\ud800b"}], "stop": ["\\udc00"]}'),
        (TEXT, b'{"prompt": "a\\ud800b"}'),
        (RESPONSES, b'{"input": "a\\ud800b"}'),
    ):
        status, answer, seen = answer_of(f"x{END}", path, body)
        assert status == 200, answer
        text = tokenizer_of("Qwen2.5").decode(list(seen[0].prompt_ids))
        assert "a\ufffdb" in text
    said = CALL.replace('"a": 1', '"a": "\\ud800"')
    for path in BODIES:
        status, answer, _ = answer_of(f"{said}{END}", path, BODIES[path] | {"stream": True})
        assert status == 200 and "\ufffd" in json.dumps(answer, ensure_ascii=False)


def test_a_top_p_of_zero_keeps_the_most_likely_token():
    for top_p, kept in ((0, (1.0, 1)), (0.5, (0.5, -1))):
        _, _, seen = answer_of(f"x{END}", CHAT, {"messages": ASK, "top_p": top_p})
        assert (seen[0].sampling.top_p, seen[0].sampling.top_k) == kept


def test_models_have_their_context_length_and_prompts_can_be_tokenized():
    async def work(client):
        tokenized = await client.post("/tokenize", {"messages": ASK})
        closed = await client.post("/tokenize", {"messages": ASK, "add_generation_prompt": False})
        counted = await client.post("/v1/messages/count_tokens", {"model": "m", "messages": ASK})
        await client.post(CHAT, {"messages": ASK})
        return await client.get("/v1/models"), tokenized, closed, counted, client.engine.seen[0].prompt_ids

    models, tokenized, closed, counted, ids = with_server(lambda text, seed: f"x{END}", work)
    assert models[1]["data"][0]["id"] == "m" and models[1]["data"][0]["max_model_len"] == 2000
    assert tokenized[1]["tokens"] == ids and counted[1]["input_tokens"] == len(ids) > closed[1]["count"]


def test_a_key_is_required_where_one_is_set():
    async def work(client):
        body = {"messages": ASK}
        keys = ("", "Bearer no", "Bearer key", "bearer key")
        given = [{"Authorization": key} for key in keys] + [{"x-api-key": key} for key in ("no", "key")]
        found = [(await client.post(CHAT, body, **headers))[0] for headers in given]
        reader, writer = await asyncio.open_connection(client.http.host, client.http.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer \xff\r\nConnection: close\r\n\r\n")
        found.append(int((await reader.readline()).split()[1]))  # a key in bytes that are no text
        writer.close()
        return found

    found = with_server(lambda text, seed: f"x{END}", work, api_key="key")
    assert found == [401, 401, 200, 200, 401, 200, 401]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(stream):
    async def work(client):
        client.engine.hold = True
        asking = asyncio.create_task(client.post(CHAT, {"messages": ASK, "stream": stream}))
        while not client.engine.seen:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not client.engine.aborted:
            await asyncio.sleep(0.01)
        return len(client.engine.aborted), client.engine.has_work()

    assert with_server(lambda text, seed: f"x{END}", work) == (1, False)


def test_a_long_prompt_is_tokenized_while_others_are_answered(monkeypatch):
    tokenize, answered = UntrustedText.encode, threading.Event()

    def slow(self, text, **how):
        if len(text) > app.LONG_PROMPT and not answered.wait(10):
            raise AssertionError("no other request was answered meanwhile")
        return tokenize(self, text, **how)

    monkeypatch.setattr(app, "LONG_PROMPT", 1000)
    monkeypatch.setattr(UntrustedText, "encode", slow)
    long = "many words " * 100
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": long}]},
        TEXT: {"prompt": long},
        "/tokenize": {"prompt": long},
        "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": long}]},
    }

    async def work(client):
        asked = [asyncio.create_task(client.post(path, body)) for path, body in bodies.items()]
        stream = asyncio.create_task(client.post(CHAT, bodies[CHAT] | {"stream": True}))
        short = await client.post(CHAT, {"messages": ASK})
        assert not any(one.done() for one in (*asked, stream))
        answered.set()
        return short[0], [(await one)[0] for one in asked], (await stream)[1][-1]

    assert with_server(lambda text, seed: f"x{END}", work) == (200, [200] * 4, "[DONE]")


def test_a_prompt_that_is_too_long_is_an_error_also_where_it_is_tokenized_in_a_thread(monkeypatch):
    monkeypatch.setattr(app, "LONG_PROMPT", 100)
    for stream in (False, True):
        status, answer, _ = answer_of(
            "x", CHAT, {"messages": [{"role": "user", "content": "w" * 3000}], "stream": stream}
        )
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_streamed_retry_is_kept_open_while_it_waits_for_the_first_request(monkeypatch):
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.02)

    async def work(client):
        client.engine.hold = True
        body = {"messages": ASK, "stream": True}
        first = asyncio.create_task(client.post(CHAT, body))
        while not client.engine.seen:
            await asyncio.sleep(0.01)
        async with client.http.post(
            CHAT, data=json.dumps(body).encode(), headers={"x-stainless-retry-count": "1"}
        ) as again:
            waiting = await again.content.readline()
            client.engine.hold = False
            text = await again.text()
        (_, sampled), got = await first, events(text)
        return waiting, sampled[0]["id"] == got[0]["id"], got[-1], len(client.engine.seen)

    assert with_server(lambda text, seed: f"x{END}", work) == (b": waiting\n", True, "[DONE]", 1)


@pytest.mark.parametrize(
    ("path", "more"),
    [(CHAT, {"logit_bias": {"5": 1.0}}), (TEXT, {"prompt": "a", "echo": True}), (TEXT, {"prompt": "a", "suffix": "b"})],
)
def test_a_field_that_is_not_implemented_is_named_plainly(path, more):
    status, answer, seen = answer_of(f"x{END}", path, ({"messages": ASK} if path == CHAT else {}) | more)
    name = list(more)[-1]
    assert (status, answer["error"]["param"], seen) == (400, name, [])
    assert answer["error"]["message"] == f"`{name}` is not supported by this server; leave it out."


def test_a_retry_joins_the_request_that_is_under_way_or_gets_its_answer_again():
    async def work(client):
        body, again = {"messages": ASK}, {"x-stainless-retry-count": "1"}
        client.engine.hold = True
        first = asyncio.create_task(client.post(CHAT, body))
        while not client.engine.seen:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(client.post(CHAT, body, **again))
        await asyncio.sleep(0.05)
        client.engine.hold = False
        answers = [await first, await second, await client.post(CHAT, body, **again)]
        sampled = len(client.engine.seen)
        answers.append(await client.post(CHAT, body))
        return [answer[1]["id"] for answer in answers], sampled, len(client.engine.seen)

    ids, sampled, all_sampled = with_server(lambda text, seed: f"x{END}", work)
    assert len(set(ids[:3])) == 1 and sampled == 1
    assert ids[3] != ids[0] and all_sampled == 2  # without the mark it is a second sample


def test_an_idempotency_key_repeats_the_same_request_alone():
    async def work(client):
        key, other = {"Idempotency-Key": "k"}, {"messages": [{"role": "user", "content": "2+2?"}]}
        answers = [await client.post(CHAT, body, **key) for body in ({"messages": ASK}, {"messages": ASK}, other)]
        answers.append(await client.post(TEXT, {"prompt": "a", "n": 2}, **key))
        return [(status, answer["id"]) for status, answer in answers]

    found = with_server(lambda text, seed: f"x{END}", work)
    assert [status for status, _ in found] == [200] * 4
    assert found[0] == found[1] and len({id for _, id in found}) == 3


def test_tokens_become_the_text_that_their_tokenizer_makes_of_them():
    known = WordLevel({"two": 0, "words": 1, ",": 2, "?": 3}, unk_token="?")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(known), clean_up_tokenization_spaces=True)
    assert decode(words, [0, 1, 2]) == words.decode([0, 1, 2]) == "two words,"
    plain = tokenizer_of("Qwen2.5")
    ids = plain("two words , <|im_end|>", add_special_tokens=False)["input_ids"]
    assert decode(plain, ids) == plain.decode(ids) == "two words , <|im_end|>"

    class Loud(type(plain)):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    loud = Loud(tokenizer_object=plain.backend_tokenizer)
    assert decode(loud, ids) == loud.decode(ids) == "TWO WORDS , <|IM_END|>"
