"""Tools and agents: whether they can be made, whether rows name existing ones, and whether a response has room for its
turns."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from posttrain.doctor.case import Case
from posttrain.doctor.report import ERROR, NOTE, WARNING, Finding
from posttrain.errors import UserError
from posttrain.spelling import closest

AREA = "tools"
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
            say=lambda text: case.report.fact(AREA, text.removeprefix("note: ")),
        ) as turns:
            case.turns = turns
            case.schemas = list(turns.schemas) if turns else []
    except UserError as error:
        if _has_turns(case):  # otherwise it is an error of the tokenizer, which another check reports
            yield Finding(ERROR, AREA, str(error), case.where(key))
        return
    if not _has_turns(case):
        yield from _unused_tools(case)
    if turns and turns.schemas:
        case.report.fact(
            AREA, f"Tool calls are read in the format {turns.setup.settings.format} (docs/call_formats.md)."
        )
        shown = _tokens(case, tools=case.schemas) - _tokens(case)
        case.report.fact(
            AREA, f"Their descriptions take about {shown} tokens of every prompt (data.max_prompt_length)."
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
            yield Finding(ERROR, AREA, str(error), where)
    if case.turns is None and not _has_turns(case) and (count := names.count("tool_agent")):
        what = (
            f"{count} of {len(rows)} rows name the agent tool_agent (column agent_name), but no tool would be called: "
        )
        what += f"{KEY}.enable is False."
        do = f"set {KEY}.enable=True and {_ROLLOUT}.tools=[...], or take the column out"
        yield Finding(WARNING, AREA, what, case.where(KEY), do)
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
        yield Finding(WARNING if near else NOTE, AREA, what, where, do)


def _has_turns(case: Case) -> bool:
    rollout = case.config.actor_rollout_ref.rollout
    return turn_settings(rollout.multi_turn).enable or agent_settings(rollout.agent).enable


def _unused_tools(case: Case) -> Iterator[Finding]:
    """Tools that are named in a run that calls none; a misspelt name is reported all the same."""
    settings = turn_settings(case.config.actor_rollout_ref.rollout.multi_turn)
    if not settings.tools:
        return
    what = f"{_ROLLOUT}.tools names {', '.join(settings.tools)}, but no tool would be called: {KEY}.enable is False."
    yield Finding(WARNING, AREA, what, case.where(KEY), f"set {_ROLLOUT}.multi_turn=True, or take the tools out")
    try:
        for tool in make_tools(settings.tools, settings.tool_config).values():
            tool.shutdown()
    except UserError as error:
        yield Finding(ERROR, AREA, str(error), case.where(KEY))


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
        AREA,
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
        yield Finding(WARNING, AREA, what, case.where(*keys), do)
    elif most == 1:
        what = f"{KEY}.max_assistant_turns=1: a response ends with its first call, which is never answered."
        do = "if the answer is to be used, set max_assistant_turns to 2 or more, or leave it out"
        yield Finding(NOTE, AREA, what, case.where(KEY), do)
    elif full + 1 > limit:
        what = f"A tool's answer of {settings.max_tool_response_length} characters has about {full - least} tokens and "
        what += f"would fill the response (data.max_response_length={limit}), so that the model could not go on."
        do = f"if answers get so long, raise data.max_response_length or lower {KEY}.max_tool_response_length"
        yield Finding(NOTE, AREA, what, case.where("data.max_response_length"), do)


def _shortest_call(tool: Tool, style: str) -> str:
    function: Mapping[str, Any] = tool.schema["function"]
    required = (function.get("parameters") or {}).get("required") or []
    return FORMATS[style].write(ToolCall(function["name"], {name: "" for name in required}))
