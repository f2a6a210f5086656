"""Your own workers in Ray: one process per rank, which hosts one worker, or several that share it.

    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(MyWorker), "an argument"))
    group.my_method(batch)          # spread and joined as its mark says

Ray is started by itself (and ended with the program) unless it runs already. posttrain's own workers are not made here:
a training has them in `trainer.actor_rollout_wg`.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch, get_predefined_dispatch_fn
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup
from verl.utils.py_functional import temp_env_var

_ONLY = ""  # the name of a worker that has its process to itself


class RayResourcePool(ResourcePool):
    """Processes of a group, each with a GPU of its own if `use_gpu`."""

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu, self.name_prefix = use_gpu, name_prefix or "pool"
        if detached:
            raise NotImplementedError("detached workers outlive their program: nothing does here")


class SubRayResourcePool(RayResourcePool):
    """A part of a pool: `subgroup_world_size` processes from the rank `start_bundle_index` of the whole pool on."""

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        *args: Any,
        start_bundle_index: int = 0,
        subgroup_world_size: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(process_on_nodes, *args, **kwargs)
        self.start_bundle_index, self.subgroup_world_size = start_bundle_index, subgroup_world_size

    @property
    def world_size(self) -> int:
        return self.subgroup_world_size

    def local_rank_list(self) -> list[int]:
        return super().local_rank_list()[self.start_bundle_index :][: self.subgroup_world_size]

    def local_world_size_list(self) -> list[int]:
        return super().local_world_size_list()[self.start_bundle_index :][: self.subgroup_world_size]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """The pool in parts of one size, or of these sizes; a part can be split again."""
    total = resource_pool.world_size
    if isinstance(split_size, int):
        assert total % split_size == 0, "split_size must be a divisor of world_size"
        split_size = [split_size] * (total // split_size)
    assert sum(split_size) == total, "split_size must sum up to world_size"
    first = getattr(resource_pool, "start_bundle_index", 0)
    return [
        SubRayResourcePool(
            resource_pool.store,
            resource_pool.use_gpu,
            f"{resource_pool.name_prefix}_split_{part}",
            resource_pool.max_colocate_count,
            start_bundle_index=first + sum(split_size[:part]),
            subgroup_world_size=size,
        )
        for part, size in enumerate(split_size)
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """The nodes of both pools in one."""
    assert rp1.use_gpu == rp2.use_gpu, "Both RayResourcePool must either use_gpu or not"
    assert rp1.max_colocate_count == rp2.max_colocate_count, "both pools must have the same max_colocate_count"
    assert rp1.n_gpus_per_node == rp2.n_gpus_per_node, "both pools must have the same n_gpus_per_node"
    names = f"{rp1.name_prefix}_{rp2.name_prefix}"
    return RayResourcePool(rp1.store + rp2.store, rp1.use_gpu, names, rp1.max_colocate_count)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, plain or made by `ray.remote`, with its arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """Further options of the process, as Ray knows them."""
        self._options.update(options)

    def parts(self) -> dict[str, ClassWithInitArgs]:
        """The workers of one process, by name."""
        return {_ONLY: self}


class _Colocated(RayClassWithInitArgs):
    """Several workers that share the process of their rank."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]) -> None:
        super().__init__(None)
        self.class_dict = class_dict

    def parts(self) -> dict[str, ClassWithInitArgs]:
        return dict(self.class_dict)


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One class out of several: `RayWorkerGroup(pool, it).spawn(prefix_set=names)` gives a group for each."""
    return _Colocated(class_dict)


create_colocated_worker_cls_fused = create_colocated_worker_cls


def plain_class(cls: Any) -> Any:
    """The class that `ray.remote` was given."""
    return getattr(cls, "__ray_actor_class__", None) or getattr(
        getattr(cls, "__ray_metadata__", None), "modified_class", cls
    )


class _Host:
    """The process of one rank."""

    def __init__(self, environment: dict[str, str], folder: str, paths: list[str]) -> None:
        import sys

        os.chdir(folder)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        os.environ.update(environment)
        self.workers: dict[str, Any] = {}

    def build(self, name: str, cls: Any, args: Any, kwargs: Any) -> None:
        with temp_env_var("DISABLE_WORKER_INIT", "1"):
            self.workers[name] = cls(*args, **kwargs)

    def call(self, name: str, method: str, args: Any, kwargs: Any) -> Any:
        return getattr(self.workers[name], method)(*args, **kwargs)


class RayWorkerGroup(WorkerGroup):
    """One worker on every rank. Its marked methods are the group's."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.name_prefix, self.ray_cls_with_init = name_prefix or "group", ray_cls_with_init
        self.device_name, self._name = kwargs.get("device_name", "cpu"), kwargs.get("_name", _ONLY)
        if worker_handles is not None:
            self._workers = worker_handles
        elif resource_pool is None or ray_cls_with_init is None or detached or worker_names:
            raise NotImplementedError(
                "a group is made of a resource_pool and a ray_cls_with_init; workers that outlive their program, or "
                "are found by name, are not built"
            )
        else:
            self._workers = _start(resource_pool, ray_cls_with_init, kwargs.get("worker_env") or {})
        self.world_size = len(self._workers)
        if ray_cls_with_init is not None and not isinstance(ray_cls_with_init, _Colocated):
            self._bind(plain_class(ray_cls_with_init.cls))

    def _bind(self, cls: Any) -> None:
        for name in dir(cls):
            marks = getattr(getattr(cls, name, None), MAGIC_ATTR, None)
            if marks is not None and not hasattr(self, name):
                setattr(self, name, functools.partial(self._call, name, **marks))

    def _call(
        self, _method: str, *args: Any, dispatch_mode: Any, execute_mode: Any, blocking: bool, **kwargs: Any
    ) -> Any:
        mode = get_predefined_dispatch_fn(dispatch_mode) if isinstance(dispatch_mode, Dispatch) else dispatch_mode
        given = [value for value in (*args, *kwargs.values()) if hasattr(value, "is_padding_enabled")]
        rows = [len(batch) for batch in given]
        args, kwargs = mode["dispatch_fn"](self, *args, **kwargs)
        padded = max((len(batch) - before for batch, before in zip(given, rows, strict=True)), default=0)
        if execute_mode.name == "RANK_ZERO" or dispatch_mode is Dispatch["RANK_ZERO"]:
            first = self.execute_rank_zero_async(_method, *args, **kwargs)
            return self._got(first) if blocking else first
        refs = self.execute_all_async(_method, *args, **kwargs)
        collect = functools.partial(_without_padding, functools.partial(mode["collect_fn"], self), padded)
        if blocking:
            return collect(self._got(refs))
        from verl.protocol import DataProtoFuture

        return DataProtoFuture(collect, refs)

    def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
        """A group for each of the workers that share these processes."""
        parts = {} if self.ray_cls_with_init is None else self.ray_cls_with_init.parts()
        return {
            name: RayWorkerGroup(ray_cls_with_init=parts[name], worker_handles=self._workers, _name=name)  # pyright: ignore
            for name in prefix_set
        }

    # -- calls without marks ------------------------------------------------------------------------------------------
    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Begins a call on every rank. Where every argument is a list with one entry per rank, each gets its own."""
        values = [*args, *kwargs.values()]
        if values and all(isinstance(value, list) and len(value) == self.world_size for value in values):
            calls = [
                ([arg[rank] for arg in args], {name: value[rank] for name, value in kwargs.items()})
                for rank in range(self.world_size)
            ]
        else:
            calls = [(list(args), kwargs)] * self.world_size
        pairs = zip(self._workers, calls, strict=True)
        return [worker.call.remote(self._name, method_name, *call) for worker, call in pairs]

    execute_all = execute_all_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._got(self.execute_all_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._workers[0].call.remote(self._name, method_name, list(args), kwargs)

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        return self._got(self.execute_rank_zero_async(method_name, *args, **kwargs))

    def _got(self, refs: Any) -> Any:
        import ray

        return ray.get(refs)

    @property
    def workers(self) -> list[Any]:
        return self._workers


def _start(pool: RayResourcePool, classes: RayClassWithInitArgs, environment: dict[str, str]) -> list[Any]:
    """One process per rank, each with its workers."""
    import sys

    import ray

    ensure_ray(pool.world_size)
    options = {"num_cpus": 0, "num_gpus": 1 if pool.use_gpu else 0, **classes._options}
    host = ray.remote(_Host).options(**options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(pool.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
    places = zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
    workers = []
    for rank, (local, size) in enumerate(places):
        own = {"RANK": str(rank), "RAY_LOCAL_RANK": str(local), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        workers.append(host.remote({**common, **own}, os.getcwd(), [path for path in sys.path if path]))
    for name, part in classes.parts().items():
        arguments = plain_class(part.cls), part.args, part.kwargs
        ray.get([worker.build.remote(name, *arguments) for worker in workers])
    return workers


def ensure_ray(ranks: int) -> None:
    """Starts Ray unless it runs; what was started here ends with the program."""
    import ray

    if ray.is_initialized():
        return
    from posttrain.controller.ray_cluster import RayCluster

    cluster = RayCluster(ranks)
    cluster.start()
    atexit.register(cluster.stop)


@dataclass
class ResourcePoolManager:
    """Which pool of processes each role is in."""

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Makes the pools; GPUs are asked for where there are some."""
        from verl.utils.device import is_cuda_available

        self.resource_pool_dict = {
            name: RayResourcePool(processes, is_cuda_available, name, self.max_colocate_count)
            for name, processes in self.resource_pool_spec.items()
        }

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """The processes of all pools."""
        return sum(count for processes in self.resource_pool_spec.values() for count in processes)


def _without_padding(collect: Any, padded: int, answers: list[Any]) -> Any:
    """The joined answers without those to rows that were appended so that each rank has equally many."""
    joined = collect(answers)
    return joined[: len(joined) - padded] if padded and hasattr(joined, "is_padding_enabled") else joined
