"""`posttrain tool try NAME ARGUMENTS`: a tool outside a run: its schema, what a model would read, and its answer."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.values import parse_yaml
from posttrain.conversations.settings import SIDES, TurnSettings
from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolCall
from posttrain.conversations.tools.lookup import called_name
from posttrain.conversations.tools.mcp import PREFIX as MCP_PREFIX
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError
from posttrain.spelling import OptionParser

USAGE = "posttrain tool try NAME [ARGUMENTS] [options] [key=value ...]"
USUAL = TurnSettings()
_SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def main(args: Sequence[str]) -> int:
    """Try a tool; 1 if its answer is an error."""
    options = _parser().parse_intermixed_args(list(args))
    call_text, settings = _sorted_words(options.words)
    is_server = options.name.startswith(MCP_PREFIX)
    called = options.name if options.config or is_server else called_name(options.name)
    tools = make_tools([options.name], {called: settings} if settings else {}, config_path=options.config)
    tool = _tool_of_server(tools, options.tool) if is_server else tools[called]
    print(f"{tool.name}\n{tool.note}".rstrip(), end="\n\n")
    print(f"schema:\n{json.dumps(tool.schema, indent=2, ensure_ascii=False)}\n")
    if call_text is None:
        print(_prompt(tool, options.model))
        tool.shutdown()
        return 0
    call = ToolCall(tool.name, _arguments(tool, call_text))
    answer = _answer(tool, call, _object(options.given, "--given"), options)
    print(_conversation(tool, call, answer, options.model))
    given = "".join(f", {name} {one:g}" for name, one in (("reward", answer.reward), ("cost", answer.cost)) if one)
    print(f"\n{answer.seconds:.3g} s{given}")
    if answer.metrics:
        print(f"metrics: {answer.metrics}")
    if answer.error is not None:
        print(f"error: {answer.error}")
    return int(answer.error is not None)


def _tool_of_server(tools: Mapping[str, Tool], name: str | None) -> Tool:
    if name is None and len(tools) == 1:
        return next(iter(tools.values()))
    if name is None or name not in tools:
        what = "has several tools" if name is None else f"has no tool {name}"
        raise UserError(f"the server {what}.\n  to do:  choose one: --tool {' | '.join(tools)}")
    return tools[name]


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="posttrain tool try", usage=USAGE, description="One call of a tool.")
    parser.add_argument(
        "name", metavar="NAME", help="calculator, python, search, FILE.py:FUNCTION, module.function or mcp:COMMAND"
    )
    parser.add_argument("--tool", help="which tool of an MCP server, if it has several")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="ARGUMENTS",
        help="""the call's arguments as JSON ('{"expression": "2+3"}'), or the text of a tool that takes one; without
        them only the schema is shown. Then settings of the tool (corpus=facts.jsonl)""",
    )
    parser.add_argument("--given", default="{}", help="what a row gives its conversation (create_kwargs), as JSON")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of tools in verl's form, which has NAME")
    parser.add_argument("--model", help="show what this model's chat template makes of it (folder, hub id or embedded)")
    timeout, length, side = USUAL.tool_timeout_s, USUAL.max_tool_response_length, USUAL.tool_response_truncate_side
    parser.add_argument("--timeout_s", type=float, default=timeout, help=f"seconds for the call (default {timeout:g})")
    parser.add_argument("--max_chars", type=int, default=length, help=f"longest answer (default {length})")
    parser.add_argument("--side", choices=SIDES, default=side, help=f"what is kept of a longer one (default {side})")
    return parser


def _sorted_words(words: list[str]) -> tuple[str | None, dict[str, Any]]:
    """(the arguments of the call, the tool's settings)."""
    calls = [word for word in words if not _SETTING.fullmatch(word) or word.lstrip().startswith("{")]
    if len(calls) > 1:
        raise UserError(f"a call has one word of arguments; `{calls[1]}` is one too many. Put quotes around the JSON.")
    pairs = [found for word in words if word not in calls and (found := _SETTING.fullmatch(word))]
    return (calls[0] if calls else None), {found[1]: _value(found[2]) for found in pairs}


def _value(text: str) -> Any:
    try:
        return parse_yaml(text) if text else ""
    except ValueError:
        return text


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
    parameters = tool.schema["function"].get("parameters") or {}
    if not text.lstrip().startswith("{") and len(parameters.get("required") or ()) == 1:
        return {parameters["required"][0]: text}
    return _object(text, "ARGUMENTS")


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        made = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{where} `{text}` is no JSON: {error}.\n"
            '  to do:  names and texts in double quotes, and single quotes around it all: \'{"name": "value"}\''
        ) from None
    if not isinstance(made, dict):
        raise UserError(f'{where} must be a JSON object, like \'{{"name": "value"}}\'.')
    return made


def _answer(tool: Tool, call: ToolCall, given: dict[str, Any], options: argparse.Namespace) -> ToolAnswer:
    if options.timeout_s <= 0 or options.max_chars < 1:
        raise UserError("--timeout_s is above 0, and --max_chars at least 1.")
    limits = {"timeout_s": options.timeout_s, "max_chars": options.max_chars, "side": options.side}
    with ToolRunner({tool.name: tool}, **limits) as runner:
        runner.open("try", {tool.name: given})
        (answer,) = runner.answer("try", [call]).result()
        runner.close_conversation("try")
    return answer


def _prompt(tool: Tool, model: str | None) -> str:
    if model is not None:
        return f"the prompt, by the chat template of {model}:\n{_rendered(model, tool)}"
    return f"in the prompt, as most chat templates show it:\n<tools>\n{json.dumps(tool.schema)}\n</tools>"


def _conversation(tool: Tool, call: ToolCall, answer: ToolAnswer, model: str | None) -> str:
    if model is None:
        written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return (
            f"{_prompt(tool, None)}\n\nwhat the model writes (Hermes' form):\n<tool_call>\n{written}\n</tool_call>\n\n"
            f"what it is shown:\n<tool_response>\n{answer.text}\n</tool_response>"
        )
    return f"the conversation, by the chat template of {model}:\n{_rendered(model, tool, call, answer)}"


_QUESTION = {"role": "user", "content": "(the question)"}


def _rendered(model: str, tool: Tool, call: ToolCall | None = None, answer: ToolAnswer | None = None) -> str:
    from posttrain.config.model import ModelConfig
    from posttrain.conversations.format_proof import find_format
    from posttrain.conversations.formats.base import AUTO, FORMATS
    from posttrain.conversations.templates import MessageTemplate
    from posttrain.models.embedded import byte_tokenizer
    from posttrain.models.loading import load_tokenizer

    tokenizer = byte_tokenizer() if model == "embedded" else load_tokenizer(ModelConfig(path=model))
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {model} has no chat template.")
    turns, note = [_QUESTION], ""
    if call is not None and answer is not None:
        template, notes = MessageTemplate(tokenizer), list[str]()
        name, problem = find_format(template, AUTO, notes.append)
        note = "".join(f"\n{one}" for one in (f"note: {problem}" if problem else "", *notes) if one)
        if (form := template.calls) is not None:
            turn: dict[str, Any] = dict(form.message([(call.name, call.arguments)]))
        else:
            turn = {"role": "assistant", "content": FORMATS[name].write(call)}
        result: dict[str, Any] = {"role": "tool", "name": call.name, "content": answer.text}
        if form is not None:
            result["tool_call_id"] = turn["tool_calls"][0]["id"]
        turns += [turn, result]
    try:
        text = tokenizer.apply_chat_template(turns, tools=[tool.schema], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own making
        raise UserError(f"the chat template of {model} refused the conversation: {error}") from error
    hidden = "" if tool.name in str(text) else "\n(this chat template does not show tools to the model)"
    return f"{text}{hidden}{note}"
