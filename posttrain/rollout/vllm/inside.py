"""What is reached inside a vLLM that runs in this process: its weights, its memory, and the scale of its logits.

Everything that is no public interface of vLLM is in this file.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from posttrain.kernels.tensor_parallel import Team
from posttrain.rollout.base import Stage

TAGS: dict[Stage, str] = {"weights": "weights", "cache": "kv_cache"}
"""Our stages -> the names under which vLLM's allocator holds its memory on a GPU."""


def executor_over(team: Team, device: torch.device) -> Any:
    """The class with which vLLM runs its part of a model in this rank, instead of starting processes of its own.

    Each rank of the team has a whole engine with a scheduler and one worker. All are given the same requests in the
    same order, so they schedule alike; only the layers' sums go between them. vLLM's own class for this reads the rank
    from torchrun's variables, and names its shared memory on CPUs alike in every run: after a kill nothing would start.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # pyright: ignore

    name = team.first(int.from_bytes(os.urandom(6), "little"))

    class TeamExecutor(ExecutorWithExternalLauncher):
        supports_pp = True

        def _distributed_args(self) -> tuple[str, int, int]:
            # torch's process group exists already, so no file of this name is made. Ranks are those of all workers:
            # vLLM cuts them into teams of neighbours, as we do.
            return f"file:///posttrain-{name:x}", dist.get_rank(), device.index or 0

        def _init_executor(self) -> None:
            super()._init_executor()
            remove_shared_names(team, f"posttrain-{name:x}")

        # The ranks have different layers where an engine has several stages. Each plans the caches of all, so that all
        # have as many blocks: otherwise they would schedule differently.
        def get_kv_cache_specs(self) -> list[Any]:
            return [specs for (specs,) in of_all(team, super().get_kv_cache_specs())]

        def determine_available_memory(self) -> list[int]:
            own = super(ExecutorWithExternalLauncher, self).determine_available_memory()
            return [free for (free,) in of_all(team, own)]

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            super().initialize_from_config([kv_cache_configs[team.rank]])

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            return from_last_stage(super().sample_tokens(grammar_output, non_block))

    return TeamExecutor


def of_all(team: Team, own: Any) -> list[Any]:
    """What each rank of a team gives."""
    found: list[Any] = [None] * team.size
    dist.all_gather_object(found, own, group=team.group)
    return found


def from_last_stage(made: Any) -> Any:
    """What a step has made. Only the last stage computes logits; it sends tokens and log-probs to the stages before it,
    whose schedulers go on with them. (vLLM's own way sends all logits, and has no log-probs of prompts.)"""
    from vllm.distributed.parallel_state import get_pp_group  # pyright: ignore

    stages = get_pp_group()
    return stages.broadcast_object(made, src=stages.world_size - 1) if stages.world_size > 1 else made


def prepare_stages(llm: Any) -> None:
    """Make a step of several stages one step of the engine: it schedules a batch, and returns what the last stage made
    of it. vLLM would begin one batch for each stage first, and give their tokens in later steps, when other weights may
    have come. In one process without asynchronous scheduling that is no faster, either."""
    from vllm.distributed.parallel_state import get_pp_group  # pyright: ignore

    core = llm.engine_core.engine_core
    core.batch_queue, core.step_fn = None, core.step
    runner = llm.model_executor.driver_worker.model_runner
    # vLLM makes the buffer for what a stage receives when it tries a pass, which it does not do on a CPU where the size
    # of the cache is given: the first step would end with an assertion.
    if getattr(runner, "intermediate_tensors", ...) is None and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def remove_shared_names(team: Team, prefix: str, folder: Path = Path("/dev/shm")) -> None:
    """Take the names from the shared memory of vLLM's ranks, which all have mapped: it is then freed with the last of
    them, even if they are killed."""
    from vllm.distributed import parallel_state  # pyright: ignore

    team.smallest(0)  # all ranks have come so far
    for found in list(parallel_state._groups.values()):
        ring = getattr(getattr(found(), "mq_broadcaster", None), "buffer", None)
        if ring is not None and ring.is_creator:
            ring.shared_memory.unlink()
            ring.is_creator = False  # it would do so again at its end
    if team.rank == 0:
        for path in folder.glob(f"{glob.escape(prefix)}-*"):
            path.unlink(missing_ok=True)


def can_hold_adapters(kind: str) -> bool:
    """Whether models of this class take LoRA adapters and, with these, new weights for their base."""
    from vllm import ModelRegistry  # pyright: ignore
    from vllm.lora.layers import BaseLayerWithLoRA  # pyright: ignore
    from vllm.model_executor.models.interfaces import supports_lora  # pyright: ignore

    model = ModelRegistry._try_load_model_cls(kind)
    # Older versions find no weight of a layer that is wrapped for adapters.
    return model is not None and supports_lora(model) and "load_weights" in vars(BaseLayerWithLoRA)


def close(llm: Any, *, keep_groups: bool) -> None:
    """Free the memory of an engine. vLLM would end torch's process group with its own groups; with `keep_groups`
    it stays, because training goes on with it."""
    if not keep_groups:
        llm.engine_core.shutdown()
        return
    from vllm.distributed import parallel_state  # pyright: ignore

    kept = parallel_state.destroy_distributed_environment
    # `EngineCore.shutdown` finds this function by its name in its module, and calls it last.
    parallel_state.destroy_distributed_environment = lambda: None
    try:
        llm.engine_core.shutdown()
    finally:
        parallel_state.destroy_distributed_environment = kept


class Inside:
    """The one worker of an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.worker = llm.model_executor.driver_worker
        self.model: torch.nn.Module = self.worker.model_runner.get_model()
        self.on_cuda = torch.device(llm.vllm_config.device_config.device).type == "cuda"
        self.model_config = llm.vllm_config.model_config
        self.by_layer = _are_rearranged(self.model)
        self.loading = False
        self._arrived: set[str] = set()  # names of weights since a reload began
        self.scale = 1.0
        """What logits are divided by before anything else is done with them."""
        self._compute_logits: Any = self.model.compute_logits
        self._given_back: list[tuple[Any, int]] = []
        self._aside: dict[str, torch.Tensor] = {}

    # -- logits ---------------------------------------------------------------------------------------------------
    def divide_logits(self, scale: float) -> None:
        """From now on; 1 leaves them to vLLM alone."""
        self.scale = scale
        if scale == 1.0:
            self.model.__dict__.pop("compute_logits", None)
        else:
            self.model.__dict__["compute_logits"] = lambda *args, **kwargs: (
                self._compute_logits(*args, **kwargs) / scale
            )

    # -- weights --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Some of the weights, or all, or none; `finish_loading` comes before they are used."""
        weights, load = iter(weights), cast("Any", self.model).load_weights
        pending = next(weights, None)  # a reload that is given nothing would leave the layers empty
        if not self.by_layer and pending is not None:
            load(chain((pending,), weights))
            return
        while pending is not None:
            if pending[0] in self._arrived:  # another sync, before anybody has used the last one
                self.finish_loading()
            if not self.loading:
                from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # pyright: ignore

                initialize_layerwise_reload(self.model)
                self.loading = True
            repeated: list[tuple[str, torch.Tensor]] = []
            load(self._until_repeated(chain((pending,), weights), repeated))
            pending = repeated[0] if repeated else None

    def _until_repeated(
        self, weights: Iterable[tuple[str, torch.Tensor]], repeated: list[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that have not come since the reload began; the first that has goes to `repeated`. vLLM lets go of what
        a layer is loaded with as soon as it has all of it."""
        for name, weight in weights:
            if name in self._arrived:
                repeated.append((name, weight))
                return
            self._arrived.add(name)
            yield name, weight

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Layers that vLLM keeps in an order of its own are put into it."""
        if self.loading:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # pyright: ignore

            finalize_layerwise_reload(self.model, self.model_config)
            self.loading = False
            self._arrived.clear()

    # -- memory ---------------------------------------------------------------------------------------------------
    def cache_bytes(self) -> int:
        if self.on_cuda:
            return sum(data.handle[1] for data in self._allocations("cache"))
        return sum(storage.nbytes() for storage in self._cache_storages())

    def drop(self, stage: Stage, *, keep: bool) -> None:
        """Give the memory of a stage back; with `keep` what was in it is held in host memory. On a CPU weights stay."""
        if self.on_cuda:
            self._set_aside(stage, keep=keep)
            torch.cuda.synchronize()
            _unmap(TAGS[stage])
            torch.cuda.empty_cache()
        elif stage == "cache":
            self._given_back = [(storage, storage.nbytes()) for storage in self._cache_storages()]
            for storage, _ in self._given_back:
                storage.resize_(0)

    @torch.no_grad()
    def take(self, stage: Stage) -> None:
        """Have it again, with what was kept."""
        if self.on_cuda:
            self.worker.wake_up([TAGS[stage]])
            if stage == "weights":
                held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
                for name, tensor in self._aside.items():
                    held[name].data.copy_(tensor)
                self._aside = {}
                self._forget_adapter_mapping()
        elif stage == "cache":
            for storage, size in self._given_back:
                storage.resize_(size)
            for cache in self.worker.model_runner.kv_caches:
                cache.zero_()
            self._given_back = []

    def _forget_adapter_mapping(self) -> None:
        """Which row has which adapter lies in the memory that was given back, and vLLM writes only what changes."""
        held = getattr(getattr(self.worker.model_runner, "lora_manager", None), "_adapter_manager", None)
        if held is not None:
            held._last_mapping = None

    def _set_aside(self, stage: Stage, *, keep: bool) -> None:
        """Buffers always: no sync brings them."""
        if stage == "weights":
            tensors = dict(self.model.named_buffers())
            if keep:
                tensors |= dict(self.model.named_parameters())
            self._aside = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def _allocations(self, stage: Stage) -> Iterator[Any]:
        from vllm.device_allocator import get_mem_allocator_instance  # pyright: ignore

        for data in get_mem_allocator_instance().pointer_to_data.values():
            if data.tag == TAGS[stage]:
                yield data

    def _cache_storages(self) -> list[Any]:
        """All layers may lie in one."""
        found = {
            cache.untyped_storage()._cdata: cache.untyped_storage() for cache in self.worker.model_runner.kv_caches
        }
        return [*found.values()]


def _are_rearranged(model: torch.nn.Module) -> bool:
    """Whether vLLM has put weights into an order of its own (on CPUs, and experts), so that new ones must be, too."""
    experts = any("FusedMoE" in kind.__name__ for module in model.modules() for kind in type(module).__mro__)
    return experts or any(weight.numel() == 0 for weight in model.parameters())


def _unmap(tag: str) -> None:
    """Give back the device memory under one name. Newer versions of vLLM know how themselves."""
    from vllm.device_allocator import get_mem_allocator_instance  # pyright: ignore

    allocator = get_mem_allocator_instance()
    if hasattr(allocator, "discard"):
        allocator.discard((tag,))
        return
    from vllm.device_allocator.cumem import unmap_and_release  # pyright: ignore

    for data in allocator.pointer_to_data.values():
        if data.tag == tag:
            unmap_and_release(data.handle)
