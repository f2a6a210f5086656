"""verl's loop over tools and interactions, to inherit from: a state is handled by a method, which gives the next one.

    @register("my_tool_agent")
    class Mine(ToolAgentLoop):
        async def _handle_generating_state(self, agent_data, sampling_params, ignore_termination=False): ...

Without a subclass posttrain's own agents do the same (`rollout.multi_turn`). Tools are the run's: `self.tools` calls
them in their worker processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from enum import Enum
from typing import Any
from uuid import uuid4

from posttrain.conversations.tools.base import ToolCall
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import FormatParser, FunctionCall
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.profiler import simple_timer


class AgentState(Enum):
    """What comes next in a conversation."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """A conversation as the methods hand it on. `extra_fields` is free."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        image_data: Any = None,
        video_data: Any = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: dict[str, Any] | None = None,
        interaction: Any = None,
        interaction_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.messages, self.image_data, self.video_data = messages, image_data, video_data
        self.metrics: dict[str, Any] = metrics if metrics is not None else {}
        self.request_id, self.tools_kwargs = request_id, tools_kwargs or {}
        self.interaction, self.interaction_kwargs = interaction, interaction_kwargs or {}
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.extra_fields: dict[str, Any] = {}


class RunTool:
    """One of the run's tools, by verl's interface; posttrain opens and closes it with the conversation."""

    def __init__(self, chat: Any, schema: dict[str, Any]) -> None:
        self._chat, self.tool_schema = chat, OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = await self._chat.call_tool(ToolCall(self.name, parameters))
        return ToolResponse(text=answer.text), answer.reward, dict(answer.metrics)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """posttrain does so when the conversation ends."""


class ToolAgentLoop(AgentLoopBase):
    """Generates, answers tool calls or has an interaction answer, and generates again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        turns, chat = self.rollout_config.multi_turn, self.server_manager.chat
        self.max_user_turns, self.max_assistant_turns = turns.max_user_turns, turns.max_assistant_turns
        self.max_parallel_calls, self.max_tool_response_length = (
            turns.max_parallel_calls,
            turns.max_tool_response_length,
        )
        self.tool_response_truncate_side = turns.tool_response_truncate_side
        self.tools: dict[str, Any] = {tool.name: tool for tool in (RunTool(chat, one) for one in chat.tools)}
        self.tool_schemas: list[dict[str, Any]] = list(chat.tools)
        self.tool_parser_name = chat.settings.format
        self.tool_parser: Any = FormatParser(self.tokenizer, self.tool_parser_name)
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )
        self.interaction_config_file = turns.interaction_config_path
        self.interaction_map: dict[str, Any] = {}
        if self.interaction_config_file:
            self.interaction_map = self._initialize_interactions(self.interaction_config_file)

    def _initialize_interactions(self, interaction_config_file: str) -> dict[str, Any]:
        from verl.interactions.utils.interaction_registry import initialize_interactions_from_config

        return initialize_interactions_from_config(interaction_config_file)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        data = await self._begin(**kwargs)
        try:
            state = AgentState.PENDING
            while state is not AgentState.TERMINATED:
                state = await self._handle(state, data, sampling_params)
        finally:
            if data.interaction is not None:
                await data.interaction.finalize_interaction(data.request_id)
        split = len(data.prompt_ids) - len(data.response_mask)
        scores = {"turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards}
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:split],
            response_ids=data.prompt_ids[split:][: self.response_length],
            response_mask=data.response_mask[: self.response_length],
            response_logprobs=data.response_logprobs[: self.response_length] or None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={**data.extra_fields, **scores},
        )

    async def _begin(self, **row: Any) -> AgentData:
        given = dict(row.get("interaction_kwargs") or {})
        data = AgentData(
            messages=[dict(one) for one in row["raw_prompt"]],
            request_id=uuid4().hex,
            tools_kwargs=row.get("tools_kwargs") or {},
            interaction_kwargs=given,
        )
        if self.interaction_map:
            if given.get("name") not in self.interaction_map:
                raise ValueError(
                    f"interaction_kwargs names {given.get('name')!r}; there are {list(self.interaction_map)}"
                )
            data.interaction = self.interaction_map[given["name"]]
            await data.interaction.start_interaction(data.request_id, **given)
        return data

    async def _handle(self, state: AgentState, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        if state is AgentState.PENDING:
            return await self._handle_pending_state(data, sampling_params)
        if state is AgentState.GENERATING:
            return await self._handle_generating_state(data, sampling_params)
        if state is AgentState.PROCESSING_TOOLS:
            return await self._handle_processing_tools_state(data)
        if state is AgentState.INTERACTING:
            return await self._handle_interacting_state(data)
        raise ValueError(f"{state} is no state of this loop")

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """The prompt, with the schemas of the tools."""
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, tools=self.tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """A turn of the model."""
        left = self.response_length - len(agent_data.response_mask)
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                request_id=agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params={"max_tokens": left, **sampling_params},
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = list(output.token_ids)
        agent_data.prompt_ids = agent_data.prompt_ids + agent_data.response_ids
        agent_data.response_mask += [1] * len(agent_data.response_ids)
        agent_data.response_logprobs += list(output.log_probs or [])
        if not ignore_termination and len(agent_data.response_mask) >= self.response_length:
            return AgentState.TERMINATED
        if self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns:
            return AgentState.TERMINATED
        if self.max_user_turns and agent_data.user_turns >= self.max_user_turns:
            return AgentState.TERMINATED
        schemas = [tool.tool_schema for tool in self.tools.values()]
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(agent_data.response_ids, schemas)
        text = self.tokenizer.decode(agent_data.response_ids, skip_special_tokens=True)
        agent_data.messages.append({"role": "assistant", "content": text})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if agent_data.interaction is not None else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Answers to the calls, side by side."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            answers = await asyncio.gather(
                *(self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls)
            )
        agent_data.tool_rewards += [reward for _, reward, _ in answers if reward is not None]
        ids = [{} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id} for call in calls]
        told = [
            {"role": "tool", "content": answer[0].text or "", **own} for answer, own in zip(answers, ids, strict=True)
        ]
        return await self._tell(agent_data, told)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """What the interaction says to the turn."""
        is_over, response, score, metadata = await agent_data.interaction.generate_response(
            agent_data.request_id, agent_data.messages, **agent_data.interaction_kwargs
        )
        if score is not None:
            agent_data.turn_scores.append(score)
        if isinstance(metadata, dict):
            agent_data.extra_fields.update(metadata)
        state = await self._tell(agent_data, [{"role": "user", "content": response}])
        return AgentState.TERMINATED if is_over else state

    async def _tell(self, agent_data: AgentData, messages: Sequence[dict[str, Any]]) -> AgentState:
        """Messages behind the model's turn; without room for them the conversation ends."""
        agent_data.messages.extend(messages)
        agent_data.user_turns += 1
        ids = await self.apply_chat_template(list(messages), remove_system_prompt=True)
        if len(agent_data.response_mask) + len(ids) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.prompt_ids = agent_data.prompt_ids + list(ids)
        agent_data.response_mask += [0] * len(ids)
        agent_data.response_logprobs += [0.0] * len(ids)
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """(what the tool answers, a reward, metrics). An error is an answer."""
        tool, name = self.tools.get(tool_call.name), tool_call.name
        if tool is None:
            return _failed(f"Unknown function '{name}'. Available tools: {list(self.tools)}")
        try:
            arguments = json.loads(tool_call.arguments)
        except (ValueError, TypeError) as error:
            return _failed(f"Invalid JSON in arguments for '{name}': {error}")
        instance = None
        try:
            if isinstance(tool, FunctionTool):
                response, reward, metrics = normalize_function_tool_return(await tool.call(arguments))
            else:
                given = (tools_kwargs.get(name) or {}).get("create_kwargs", {})
                instance, _ = await tool.create(create_kwargs=given)
                response, reward, metrics = await tool.execute(instance, arguments, agent_data=agent_data)
        except Exception as error:
            return _failed(f"Error executing tool '{name}': {error}")
        finally:
            if instance is not None and not isinstance(tool, FunctionTool):
                await tool.release(instance)
        if response.text and not isinstance(tool, RunTool):  # posttrain cuts the answers of the run's own tools
            cut = shortened(response.text, self.max_tool_response_length, self.tool_response_truncate_side)
            response = ToolResponse(text=cut, image=response.image, video=response.video)
        return response, reward, metrics

    def _build_assistant_message(self, content: str, agent_data: AgentData) -> dict[str, Any]:
        """The model's turn as a message, with the calls that are answered."""
        calls = list[dict[str, Any]]()
        for call in agent_data.tool_calls[: self.max_parallel_calls]:
            try:
                arguments = json.loads(call.arguments)
            except ValueError:  # as the model wrote it
                arguments = call.arguments
            own = {} if call.tool_call_id is None else {"id": call.tool_call_id}
            calls.append({"type": "function", "function": {"name": call.name, "arguments": arguments}, **own})
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def _failed(words: str) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    return ToolResponse(text=words), 0.0, {}


def shortened(text: str, most: int, side: str) -> str:
    """At most `most` characters and a mark. The side is the one that is cut off; `middle` keeps both ends."""
    if len(text) <= most:
        return text
    if side == "left":
        return f"(truncated)...{text[-most:]}"
    if side == "right":
        return f"{text[:most]}...(truncated)"
    return f"{text[: most // 2]}...(truncated)...{text[-(most // 2) :]}"
