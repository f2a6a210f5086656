"""What conversations are made of: the chat template, tools and agents.

The template has a generation prompt, ends turns with an end token, and gives the same text every time. Tools and agents
can be made, rows name existing ones, and a response has room for its turns.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch

from posttrain.conversations.chat import Setup
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.loop import tool_arguments
from posttrain.conversations.opening import check_rows, open_conversations
from posttrain.conversations.settings import TURNS_KEY as KEY
from posttrain.conversations.settings import agent_settings, turn_settings
from posttrain.conversations.tools.base import Tool, ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.data.chat import ignored_template_settings
from posttrain.doctor.case import ERROR, NOTE, WARNING, Case, Finding
from posttrain.errors import UserError
from posttrain.models.loading import end_token_ids
from posttrain.spelling import closest

TEMPLATE, TOOLS = "template", "tools"  # areas of the report
_CLOCK = re.compile(r"strftime_now\(\s*['\"](.+?)['\"]\s*\)")
_WORD = "Xyzzy"  # an answer that no template contains


def check_template(case: Case) -> Iterator[Finding]:
    try:
        tokenizer = case.tokenizer
    except UserError as error:
        yield Finding(ERROR, TEMPLATE, str(error), case.where(f"{case.tree.model}.path"))
        return
    yield from _vocabulary(case, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        case.report.fact(TEMPLATE, "The tokenizer has no chat template: prompts are used as they are.")
        yield from _ends(case, tokenizer, None)
        return
    where = template_name(case)
    yield from _generation_prompt(case, where)
    data = case.config.data
    for what in ignored_template_settings(tokenizer, data.system_prompt, data.apply_chat_template_kwargs):
        yield Finding(WARNING, TEMPLATE, what, where, "take the setting out, or take a template that reads it")
    yield from _clock(case, where)
    yield from _ends(case, tokenizer, where)
    yield from _prefix(case, where)


def template_name(case: Case) -> str:
    return f"the chat template of {case.model.tokenizer_path or case.model.path}"


def _render(case: Case, *turns: str, generation: bool = False) -> str | None:
    # Turns alternate between user and assistant; None if the template rejects them.
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    options = {**case.config.data.apply_chat_template_kwargs, "add_generation_prompt": generation}
    try:
        return str(case.tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:  # templates raise any error; for real prompts the check of the data reports it
        return None


def refuses_all(case: Case) -> bool:
    """Whether the template fails on the simplest prompt, so that its error on a row is its own fault."""
    return _render(case, "1 + 1 = ?", generation=True) is None


def _generation_prompt(case: Case, where: str) -> Iterator[Finding]:
    plain, asked = _render(case, "1 + 1 = ?"), _render(case, "1 + 1 = ?", generation=True)
    if plain is None or asked is None:
        if not any((found.level, found.area) == (ERROR, TEMPLATE) for found in case.report.findings):
            yield Finding(WARNING, TEMPLATE, "The chat template refuses a conversation of one user turn.", where)
        return
    if plain == asked:
        what = "The chat template writes no generation prompt: nothing tells the model that it is to answer."
        do = "add `{% if add_generation_prompt %}...{% endif %}` with the beginning of an assistant's turn at its end"
        yield Finding(WARNING, TEMPLATE, what, where, do)
    else:
        added = asked[len(plain) :] if asked.startswith(plain) else asked[-40:]
        case.report.fact(TEMPLATE, f"A prompt ends with {added!r}, where the model's answer begins.")


def _clock(case: Case, where: str) -> Iterator[Finding]:
    first, second = (_render(case, "1 + 1 = ?", generation=True) for _ in range(2))
    if first != second:
        what = (
            "The chat template does not give the same text for the same prompt twice: the same row is another prompt "
        )
        what += "each time, and a run cannot be repeated."
        yield Finding(WARNING, TEMPLATE, what, where, "take the clock (or whatever changes) out of it")
        return
    formats = _CLOCK.findall(str(case.tokenizer.chat_template))
    if any(datetime.now().strftime(text) in (first or "") for text in formats):
        what = "The chat template writes today's date into every prompt: the same command gives other prompts tomorrow."
        yield Finding(
            NOTE, TEMPLATE, what, where, "data.apply_chat_template_kwargs can fix it, where the template asks"
        )


def _end_ids(case: Case) -> tuple[int, ...]:
    # Ids that end a response: of the tokenizer, config.json and generation_config.json.
    from transformers import GenerationConfig

    found: set[int] = set()
    settings: list[Any] = [case.model_config]
    folder = case.model_folder
    if folder is not None and (folder / "generation_config.json").is_file():
        settings.append(GenerationConfig.from_pretrained(str(folder)))
    for one in settings:
        value = getattr(one, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return end_token_ids(case.tokenizer, found)


def _ends(case: Case, tokenizer: Any, where: str | None) -> Iterator[Finding]:
    ends = _end_ids(case)
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in ends)
    if not ends:
        what = "There is no end token (eos_token of the tokenizer, eos_token_id of config.json): no response would end "
        what += "before its limit."
        do = "name the token that ends a turn as eos_token"
        yield Finding(WARNING, TEMPLATE, what, where or str(case.model.path), do)
        return
    case.report.fact(TEMPLATE, f"A response ends with {names}.")
    text = _render(case, "1 + 1 = ?", _WORD) if where else None
    if text is None or _WORD not in text:
        return
    tail = text[text.index(_WORD) + len(_WORD) :]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    stop = list(case.config.actor_rollout_ref.rollout.stop) if case.is_rl else []
    if not set(ids) & set(ends) and not any(word in tail for word in stop):
        shown = repr(tail.strip() or tail)
        what = f"An assistant's turn ends with {shown}, which is no end token ({names}): "
        what += "responses would go on to their limit." if case.is_rl else "the model would not learn to stop."
        do = "name that token as eos_token (tokenizer_config.json) and eos_token_id (generation_config.json)"
        do += ", or add it to actor_rollout_ref.rollout.stop" if case.is_rl else ""
        yield Finding(WARNING, TEMPLATE, what, where or "", do)


def _prefix(case: Case, where: str) -> Iterator[Finding]:
    # Whether earlier turns keep their text when the conversation continues.
    thought = f"<think>hm</think>{_WORD}"
    before, after = _render(case, "1 + 1 = ?", thought), _render(case, "1 + 1 = ?", thought, "Sure?")
    if before is None or after is None or after.startswith(before.rstrip()):
        case.report.fact(TEMPLATE, "What was written stays as it is when a conversation continues (prefix-stable).")
        return
    several = not case.is_rl and any(_turns(case, row) > 1 for row in case.rows.get("train", [])[:100])
    what = "The chat template rewrites earlier turns when a conversation continues (such as their <think> parts)."
    if several:
        what += " Conversations with several answers become one row per answer: an epoch has more rows than the file."
    level = WARNING if several else NOTE
    do = "if that is not meant, take a template that keeps earlier turns (model.tokenizer_path)" if several else ""
    yield Finding(level, TEMPLATE, what, where, do)


def _turns(case: Case, row: dict[str, Any]) -> int:
    key = case.config.data.multiturn.messages_key if hasattr(case.config.data, "multiturn") else "messages"
    messages = row.get(key)
    return sum(m.get("role") == "assistant" for m in messages) if isinstance(messages, list) else 0


def _vocabulary(case: Case, tokenizer: Any) -> Iterator[Finding]:
    # Only tokens of real text count: many tokenizers have a few ids beyond the vocabulary that no text uses.
    size = getattr(case.model_config.get_text_config(), "vocab_size", None)
    text = _render(case, "1 + 1 = ?", generation=True) if getattr(tokenizer, "chat_template", None) else "1 + 1 = ?"
    rows = [text or "", *(str(row.get(case.config.data.prompt_key, "")) for row in case.rows.get("train", [])[:100])]
    largest = max(token for ids in tokenizer(rows, add_special_tokens=False)["input_ids"] for token in [*ids, 0])
    if size and largest >= size:
        what = f"The tokenizer gives token {largest}, but the model's vocabulary holds {size}: it is another model's "
        what += "tokenizer, or the model's config.json is wrong."
        key = f"{case.tree.model}.path"
        yield Finding(ERROR, TEMPLATE, what, case.where(key), "give the tokenizer that belongs to the model")


_ROLLOUT = "actor_rollout_ref.rollout"


def check_tools(case: Case) -> Iterator[Finding]:
    """Make the tools or find the agent as a run would; `Case.schemas` is counted in the lengths of prompts."""
    if not case.is_rl:
        return
    rollout = case.config.actor_rollout_ref.rollout
    key = f"{_ROLLOUT}.agent" if agent_settings(rollout.agent).enable else KEY
    try:
        with open_conversations(
            case.config,
            case.tokenizer,
            torch.device("cpu"),
            say=lambda text: case.report.fact(TOOLS, text.removeprefix("note: ")),
        ) as turns:
            case.turns = turns
            case.schemas = list(turns.schemas) if turns else []
    except UserError as error:
        if _has_turns(case):  # otherwise it is an error of the tokenizer, which another check reports
            yield Finding(ERROR, TOOLS, str(error), case.where(key))
        return
    if not _has_turns(case):
        yield from _unused_tools(case)
    if turns and turns.schemas:
        case.report.fact(
            TOOLS, f"Tool calls are read in the format {turns.setup.settings.format} (docs/call_formats.md)."
        )
        shown = _tokens(case, tools=case.schemas) - _tokens(case)
        case.report.fact(
            TOOLS, f"Their descriptions take about {shown} tokens of every prompt (data.max_prompt_length)."
        )
        yield from _room(case, turns.setup, list(turns.runner.tools.tools.values()))


def check_named_in_rows(case: Case) -> Iterator[Finding]:
    """Tools and agents that rows name. A run silently ignores what rows hold for tools that it does not have."""
    if not case.is_rl:
        return
    rows = [item for data in case.datasets.values() for item in data]
    names = [(item["extra_info"] or {}).get("agent_name") for item in rows]
    where = case.where("data.train_files")
    if case.turns is not None or not _has_turns(case):  # otherwise what the rows name is not to blame
        try:
            check_rows(case.turns, [item["extra_info"] for item in rows])
        except UserError as error:
            yield Finding(ERROR, TOOLS, str(error), where)
    if case.turns is None and not _has_turns(case) and (count := names.count("tool_agent")):
        what = (
            f"{count} of {len(rows)} rows name the agent tool_agent (column agent_name), but no tool would be called: "
        )
        what += f"{KEY}.enable is False."
        do = f"set {KEY}.enable=True and {_ROLLOUT}.tools=[...], or take the column out"
        yield Finding(WARNING, TOOLS, what, case.where(KEY), do)
    if not (case.turns and case.turns.schemas):
        return
    tools = case.turns.runner.tools.tools
    # A parquet file has an entry for every tool in every row, most of them null.
    given = (tool_arguments(item["extra_info"]) for item in rows)
    strange = Counter(name for own in given for name, values in own.items() if values and name not in tools)
    for name, count in strange.items():
        near = closest(name, tools)
        what = f"{count} of {len(rows)} rows have something for the tool {name!r} (extra_info.tools_kwargs), which is "
        what += f"none of the run's tools ({', '.join(tools)}): it would not be used."
        do = f"did you mean {near}? Rename it in the rows, or the tool" if near else f"add it to {_ROLLOUT}.tools"
        yield Finding(WARNING if near else NOTE, TOOLS, what, where, do)


def _has_turns(case: Case) -> bool:
    rollout = case.config.actor_rollout_ref.rollout
    return turn_settings(rollout.multi_turn).enable or agent_settings(rollout.agent).enable


def _unused_tools(case: Case) -> Iterator[Finding]:
    """Tools that are named in a run that calls none; a misspelt name is reported all the same."""
    settings = turn_settings(case.config.actor_rollout_ref.rollout.multi_turn)
    if not settings.tools:
        return
    what = f"{_ROLLOUT}.tools names {', '.join(settings.tools)}, but no tool would be called: {KEY}.enable is False."
    yield Finding(WARNING, TOOLS, what, case.where(KEY), f"set {_ROLLOUT}.multi_turn=True, or take the tools out")
    try:
        for tool in make_tools(settings.tools, settings.tool_config).values():
            tool.shutdown()
    except UserError as error:
        yield Finding(ERROR, TOOLS, str(error), case.where(KEY))


def _tokens(case: Case, **shown: Any) -> int:
    options = {**case.config.data.apply_chat_template_kwargs, **shown}
    text = case.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, **options)
    return len(_ids(case, str(text)))


def _ids(case: Case, text: str) -> list[int]:
    return case.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _room(case: Case, setup: Setup, tools: Sequence[Tool]) -> Iterator[Finding]:
    # All turns and tool results share data.max_response_length.
    settings = setup.settings
    limit, most = case.config.data.max_response_length, settings.max_assistant_turns
    call = min(len(_ids(case, _shortest_call(tool, settings.format))) for tool in tools)
    end = case.tokenizer.eos_token_id
    frame = len(setup.template.ids([{"role": "tool", "content": ""}], end if isinstance(end, int) else -1))
    least = call + frame
    prose = json.dumps(case.schemas)
    full = least + math.ceil(settings.max_tool_response_length * len(_ids(case, prose)) / len(prose))
    case.report.fact(
        TOOLS,
        f"A call and its answer take at least {least} tokens of data.max_response_length={limit}, and about {full} "
        f"where the answer has {settings.max_tool_response_length} characters (multi_turn.max_tool_response_length): "
        f"room for {limit // least} calls at most, for {limit // full} with such answers.",
    )
    wanted = 1 if most is None else most - 1
    keys = ("data.max_response_length",) if most is None else ("data.max_response_length", KEY)
    if wanted * least + 1 > limit:
        turns_words = "a call and an answer to it" if most is None else f"{most} turns (max_assistant_turns)"
        what = (
            f"data.max_response_length={limit} has no room for {turns_words}: each call takes {least} tokens or more "
        )
        what += "with the shortest answer, and the model's last turn comes behind them."
        do = f"raise data.max_response_length above {wanted * full}, or allow fewer turns"
        yield Finding(WARNING, TOOLS, what, case.where(*keys), do)
    elif most == 1:
        what = f"{KEY}.max_assistant_turns=1: a response ends with its first call, which is never answered."
        do = "if the answer is to be used, set max_assistant_turns to 2 or more, or leave it out"
        yield Finding(NOTE, TOOLS, what, case.where(KEY), do)
    elif full + 1 > limit:
        what = f"A tool's answer of {settings.max_tool_response_length} characters has about {full - least} tokens and "
        what += f"would fill the response (data.max_response_length={limit}), so that the model could not go on."
        do = f"if answers get so long, raise data.max_response_length or lower {KEY}.max_tool_response_length"
        yield Finding(NOTE, TOOLS, what, case.where("data.max_response_length"), do)


def _shortest_call(tool: Tool, style: str) -> str:
    function: Mapping[str, Any] = tool.schema["function"]
    required = (function.get("parameters") or {}).get("required") or []
    return FORMATS[style].write(ToolCall(function["name"], {name: "" for name in required}))
