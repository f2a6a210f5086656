"""What this package does not give says so, and what to use instead: an import hook answers for modules and names."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

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


_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def not_given(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: an error that says what to use instead of a name which is not here."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python's own questions
        words = _words(f"{module}.{name}")
        # `from module import name` throws an AttributeError's words away; everything else expects one.
        raise ImportError(words, name=module) if _is_import(sys._getframe(1)) else AttributeError(words)

    return missing


def _is_import(frame: Any) -> bool:
    while frame is not None and frame.f_globals.get("__name__", "").startswith("verl"):
        if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


class _Loader(SourceFileLoader):
    """Gives a module its `__getattr__`; one that the module itself defines replaces it."""

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = not_given(module.__name__)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Asked first: it loads what is below `verl`, and answers for modules that have no file here."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("verl."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            raise ModuleNotFoundError(_words(fullname), name=fullname)
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """Have imports of missing modules, and of missing names in modules, answered in words."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _words(name: str) -> str:
    return f"posttrain-verl does not give `{name}`. {instead_of(name)}"
