"""Agent loops by verl's interface, led by posttrain's own loop over agents (docs/own_agent.md).

    @register("my_agent")
    class MyAgent(AgentLoopBase):
        async def run(self, sampling_params, **kwargs) -> AgentLoopOutput: ...

An instance is made for each conversation. Tokens that `response_mask` marks are those that `server_manager.generate`
gave, and have the log-probs that came with them.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from posttrain.conversations.agents import register_agent
from posttrain.conversations.conversation import ChatError
from posttrain.conversations.untrusted_text import untrusted_text
from posttrain.errors import UserError
from verl._agent_config import verl_config
from verl.workers.rollout.replica import TokenOutput

Loop = TypeVar("Loop", bound=type)
_ENDS = ("max_tokens", "max_new_tokens", "stop")
"""What a turn may be asked for otherwise than the run's settings say."""


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Makes a class known under the name that `agent_name` of a row, or rollout.agent.default_agent_loop, gives."""
    return register_agent(agent_name)


class DictConfigWrap:
    """Settings, handed to a class's `__init__`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Tools, handed to a class's `__init__` through Hydra, which would turn a plain list of them into settings."""

    def __init__(self, tools: Any) -> None:
        self.tools = tools


@dataclass
class AgentLoopMetrics:
    """What a loop measured; posttrain measures its own times."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """A conversation as one row, or one row of several."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            known = {one.name for one in fields(AgentLoopMetrics)}
            self.metrics = AgentLoopMetrics(**{name: value for name, value in self.metrics.items() if name in known})


class AsyncLLMServerManager:
    """The model, as one conversation asks it."""

    def __init__(self, chat: Any, given: Mapping[str, Any]) -> None:
        self.chat, self._given = chat, dict(given)

    async def generate(
        self,
        request_id: Any = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        **more: Any,
    ) -> TokenOutput:
        """What the model writes behind these tokens. `request_id` is not needed: a conversation stays where it is."""
        unknown = [
            name for name, value in {"image_data": image_data, "video_data": video_data, **more}.items() if value
        ]
        if unknown:
            raise ChatError(f"server_manager.generate: {', '.join(unknown)} cannot be given; prompts are text")
        own = dict(sampling_params or {})
        for name, value in own.items():
            if name not in _ENDS and value != self._given.get(name, value):
                raise ChatError(
                    f"server_manager.generate: {name}={value} is not the run's ({self._given[name]}), which training "
                    "computes with; of a single turn only max_tokens and stop can be set"
                )
        most = own.get("max_tokens") or own.get("max_new_tokens")
        output = await self.chat.sample(list(prompt_ids), max_tokens=most, stop=own.get("stop") or ())
        log_probs = [float(one) for one in output.log_probs]
        return TokenOutput(list(output.token_ids), log_probs, stop_reason=_REASONS.get(output.finish_reason))


_REASONS = {"stop": "completed", "length": "length"}
LLMServerClient = LLMServerManager = AsyncLLMServerManager


class AgentLoopBase(ABC):
    """A subclass has `run`; an instance leads one conversation."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data if data_config is None else data_config.config
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.system_prompt = _opening(tokenizer, self.apply_chat_template_kwargs)
        self.loop = asyncio.get_event_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Leads the conversation; gives it as one row, or as several: one sample, with the reward of the last."""

    async def apply_chat_template(
        self,
        messages: list[Any],
        tools: Any = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **more: Any,
    ) -> list[int]:
        """Messages as token ids, up to where the model's turn begins."""
        if images or videos or any(more.values()):
            raise ChatError("apply_chat_template: prompts are text")
        options = {**self.apply_chat_template_kwargs, **({"tools": tools} if tools else {})}

        def render(those: Sequence[Any]) -> str:
            return self.tokenizer.apply_chat_template(those, tokenize=False, add_generation_prompt=True, **options)

        text = untrusted_text(self.tokenizer)
        if remove_system_prompt:  # observations: whatever an environment spells, it writes no control tokens
            return text.ids(messages, render)[len(self.system_prompt) :]
        return text.encode(render(messages))

    async def process_vision_info(self, messages: list[Any]) -> dict[str, Any]:
        """Pictures of messages: there are none."""
        return {}

    process_multi_modal_info = process_vision_info

    @classmethod
    def as_agent(cls, told: Mapping[str, Any], **given: Any) -> Callable[..., Any]:
        """posttrain's agent of this class; `given` goes to `__init__`."""
        if inspect.isabstract(cls):
            missing = f"the agent loop {cls.__name__} has no `run`"
            raise UserError(f"{missing}.\n  to do:  write `async def run(self, sampling_params, **kwargs)` in it")
        config, tokenizer = verl_config(told["config"]), told["tokenizer"]
        if hasattr(cls, "init_class"):  # of earlier versions: once for all
            cls.init_class(config=config, tokenizer=tokenizer, processor=None, **given)  # pyright: ignore

        async def lead(chat: Any, row: dict[str, Any]) -> Any:
            sampling = _sampling(told["config"], validate=chat.validate)
            loop = cls(
                trainer_config=DictConfigWrap(config),
                server_manager=AsyncLLMServerManager(chat, sampling),
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=None,
                data_config=DictConfigWrap(config.data),
                **given,
            )
            return _taken(chat, await loop.run(dict(sampling), **_fields(row)))

        return lead


def _taken(chat: Any, output: Any) -> Any:
    """The rows of one output or of a list of them, which are one sample; and its reward, that of the last one."""
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    strange = [type(one).__name__ for one in outputs if not isinstance(one, AgentLoopOutput)]
    if strange or not outputs:
        raise ChatError(f"run gave {strange[0] if strange else 'an empty list'}, not AgentLoopOutput or a list of them")
    for one in outputs:
        if one.multi_modal_data and any(one.multi_modal_data.values()):
            raise ChatError("AgentLoopOutput.multi_modal_data: prompts are text")
        chat.compose(one.prompt_ids, one.response_ids, one.response_mask)
        chat.facts.update(one.extra_fields)
    return outputs[-1].reward_score


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's fields by verl's names."""
    info = row.get("extra_info") or {}
    found = {name: row.get(name) for name in ("raw_prompt", "data_source", "index", "uid")}
    found |= {"reward_model": {"ground_truth": row.get("ground_truth"), "style": "rule"}, "extra_info": info}
    found |= {name: info.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}
    return found | {"agent_name": info.get("agent_name")}


def _sampling(config: Any, *, validate: bool) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout.val_kwargs if validate else rollout
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    return {name: getattr(chosen, name, getattr(rollout, name)) for name in names} | {"logprobs": True}


def _opening(tokenizer: Any, options: Mapping[str, Any]) -> list[int]:
    """What a template writes before the first message by itself: a system prompt of its own."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    said = [{"role": "user", "content": ""}]
    one, two = (tokenizer.apply_chat_template(said * times, tokenize=False, **options) for times in (1, 2))
    text = one[: len(one) - (len(two) - len(one))]
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
