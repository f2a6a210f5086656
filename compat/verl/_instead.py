"""What to use instead of the names of verl that are not given here, by the longest matching beginning."""

from __future__ import annotations

_DEFAULT = (
    "Its README lists what it gives (`compat/README.md`); docs/architecture.md says where posttrain keeps the rest."
)

INSTEAD = {
    "verl.workers.megatron_workers": "Its workers are those of `verl.workers.fsdp_workers`: "
    "actor_rollout_ref.actor.strategy=megatron chooses the engine in them (docs/megatron.md).",
    "verl.models": "Models are loaded by transformers and decoded by posttrain's own engine: nothing has to be "
    "registered. docs/add_model.md says what is proved about a model when it is loaded.",
    "verl.third_party": "No engine is patched here. actor_rollout_ref.rollout.name chooses the engine.",
    "verl.workers.rollout": "Engines are those of `posttrain.rollout` (contract: posttrain/rollout/base.py); "
    "actor_rollout_ref.rollout.name chooses one.",
    "verl.workers.sharding_manager": "Rollout and trainer share their weights: there is no resharding step. "
    "`sync_weights` of posttrain.workers.fsdp_workers is the place where weights travel.",
    "verl.workers.engine": "The train engine is `posttrain.engine` (contract: posttrain/engine/base.py).",
    "verl.workers.actor": "`verl.workers.actor.dp_actor` has the policy's update; a loss of "
    "your own is registered with verl.trainer.ppo.core_algos.register_policy_loss.",
    "verl.workers.critic": "The critic's update is `posttrain.workers.critic.dp_critic`.",
    "verl.workers.reward_model": "Reward models are `posttrain.workers.reward_model`; reward_model.enable=true.",
    "verl.experimental.agent_loop": "`verl.experimental.agent_loop.agent_loop` gives AgentLoopBase, AgentLoopOutput "
    "and register, `tool_agent_loop` ToolAgentLoop, `single_turn_agent_loop` SingleTurnAgentLoop, `tool_parser` "
    "ToolParser; other formats of calls are in posttrain/conversations/formats.",
    "verl.experimental": "Not built. There is one trainer: rewards run while other responses are generated, and "
    "trainer.max_staleness generates while others train.",
    "verl.interactions": "`verl.interactions.base` gives BaseInteraction, `verl.interactions.gsm8k_interaction` verl's "
    "example; an environment of your own answers the model as well (docs/own_agent.md).",
    "verl.trainer.ppo.v1": "There is one trainer: `verl.trainer.ppo.ray_trainer.RayPPOTrainer`.",
    "verl.trainer.distillation": "Distillation is not built.",
    "verl.model_merger": "Nothing has to be merged: `posttrain export RUN` writes Hugging Face files.",
    "verl.checkpoint_engine": "`posttrain.checkpoint` saves and verifies checkpoints.",
    "verl.utils.megatron_utils": "Megatron-Core is used by `posttrain.engine.megatron` (docs/megatron.md).",
    "verl.utils.megatron": "Megatron-Core is used by `posttrain.engine.megatron` (docs/megatron.md).",
    "verl.utils.vllm": "vLLM is not patched here.",
    "verl.utils.vllm_utils": "vLLM is not patched here.",
    "verl.utils.sglang": "SGLang is not patched here.",
    "verl.utils.fsdp_utils": "FSDP is applied by `posttrain.engine.torch_engine`.",
    "verl.utils.ulysses": "Sequence parallelism is `posttrain.kernels.sequence_parallel`.",
    "verl.utils.kernel": "Kernels are in `posttrain.kernels`.",
    "verl.utils.reward_score.sandbox_fusion": "Programs are judged by posttrain's own sandbox, without a server: "
    "data_source=code (docs/sandbox.md).",
    "verl.utils.reward_score": "The scorers are in posttrain/rewards/scorers (docs/rewards.md).",
}


def instead_of(name: str) -> str:
    """The sentence for a name that is missing."""
    known = [start for start in INSTEAD if name == start or name.startswith(f"{start}.")]
    return INSTEAD[max(known, key=len)] if known else _DEFAULT
