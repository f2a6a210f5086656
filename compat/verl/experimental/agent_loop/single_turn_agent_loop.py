"""verl's loop of one turn, to inherit from. Without a subclass posttrain generates single turns itself."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer


class SingleTurnAgentLoop(AgentLoopBase):
    """One response to the row's prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        metrics: dict[str, Any] = {}
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * min(len(output.token_ids), self.response_length),
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            num_turns=2,
            metrics=metrics,
        )
