"""Memory of `posttrain generate` and `posttrain eval`: what the cache may take of a GPU, and words where it ran out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from posttrain.commands.generation.settings import Settings
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError, first_line
from posttrain.trainer.run.memory import is_out_of_memory

Say = Callable[[str], None]


def settle_generation(settings: Settings, model: ModelConfig, device: torch.device, prompts: int, say: Say) -> None:
    """On a CUDA device: where nobody has set it, the cache may grow to what the model and its passes leave of the
    memory that is free before they are loaded, as another process (a run, say) may hold the rest. What is sampled does
    not depend on it, and rows that need less take less."""
    if device.type != "cuda":
        return
    from posttrain.planning.budgets import set_cache_size
    from posttrain.planning.memory_plan import Device, is_hopper
    from posttrain.planning.rl import RLPlanner

    config = copy.deepcopy(settings.config)
    config.actor_rollout_ref.model = model
    config.actor_rollout_ref.rollout.n, config.data.train_batch_size = settings.n, prompts
    config.trainer.n_gpus_per_node = config.trainer.nnodes = 1  # a checkpoint's run may have had more
    config.actor_rollout_ref.rollout.n_workers = 0
    try:
        free = Device("cuda", free_bytes(device), "what is free of the GPU", is_hopper(device))
        set_cache_size(config, free, RLPlanner().plan_generation)
    except Exception as error:  # a model whose code cannot be counted can generate nevertheless
        say(f"note: No memory plan could be made, so that defaults stay as they are: {first_line(error)}")
    chosen, rollout = config.actor_rollout_ref.rollout, settings.config.actor_rollout_ref.rollout
    rollout.kv_cache_gb = chosen.kv_cache_gb
    if rollout.gpu_memory_utilization is None and chosen.gpu_memory_utilization is not None:
        whole = torch.cuda.get_device_properties(device).total_memory  # vLLM's share is of this
        rollout.gpu_memory_utilization = chosen.gpu_memory_utilization * free_bytes(device) / whole


def free_bytes(device: torch.device) -> int:
    """What nobody holds of a CUDA device's memory."""
    return torch.cuda.mem_get_info(device)[0]


@contextmanager
def memory_words(rollout: RolloutConfig, max_tokens: int) -> Iterator[None]:
    """Running out of memory, with what lowers it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"Out of memory: {first_line(error)}\n  What lowers it, with the present values:\n"
            f"  actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs} (responses at once)\n"
            f"  actor_rollout_ref.rollout.kv_cache_gb={rollout.kv_cache_gb}, --max-tokens {max_tokens}\n"
            "  The same command goes on from what is finished."
        ) from error
