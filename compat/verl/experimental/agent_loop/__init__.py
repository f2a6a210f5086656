"""Agent loops: classes whose `run` leads a conversation."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "SingleTurnAgentLoop", "ToolAgentLoop", "register"]
