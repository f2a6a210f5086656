"""`@register(dispatch_mode=...)` on a worker's method: how a group's call is spread over its ranks, and joined again.

A mode is a pair of functions: `dispatch_fn(group, *args, **kwargs)` gives for each argument a list with one entry per
rank, `collect_fn(group, results)` what the caller gets. `register_dispatch_mode` adds modes of your own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from verl.utils.py_functional import DynamicEnum

MAGIC_ATTR = "attrs_3141562937"


class Dispatch(DynamicEnum):
    """How arguments are spread."""

    _registry: dict[str, Any] = {}  # noqa: RUF012


class Execute(DynamicEnum):
    """Who is called: all ranks, or the first."""

    _registry: dict[str, Any] = {}  # noqa: RUF012


for _name in ("RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC"):
    Dispatch.register(_name)
for _name in ("DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD"):
    Dispatch.register(_name)
for _name in ("ALL", "RANK_ZERO"):
    Execute.register(_name)

Spread = tuple[list[Any], dict[str, Any]]


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """The same to every rank."""
    ranks = worker_group.world_size
    return [[arg] * ranks for arg in args], {name: [value] * ranks for name, value in kwargs.items()}


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """As given: lists with one entry per rank are dealt, everything else goes to all."""
    return list(args), kwargs


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """Lists with one entry per rank."""
    for value in (*args, *kwargs.values()):
        assert isinstance(value, tuple | list) and len(value) == worker_group.world_size, (
            f"a list of {worker_group.world_size} entries is needed, one per rank"
        )
    return list(args), kwargs


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """Batches, each cut into equal parts; those that allow it are padded first."""
    return [_cut(arg, worker_group.world_size) for arg in args], {
        name: _cut(value, worker_group.world_size) for name, value in kwargs.items()
    }


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """A function for all ranks, then batches that are cut."""
    assert isinstance(args[0], FunctionType), "the first argument is a function"
    cut, named = dispatch_dp_compute_data_proto(worker_group, *args[1:], **kwargs)
    return [[args[0]] * worker_group.world_size, *cut], named


def _cut(batch: Any, ranks: int) -> list[Any]:
    from verl.protocol import DataProto, DataProtoFuture

    if isinstance(batch, DataProto) and batch.is_padding_enabled():
        batch.padding(-len(batch) % ranks)
    if isinstance(batch, DataProto | DataProtoFuture):
        return batch.chunk(ranks)
    if not hasattr(batch, "batch_size"):
        raise AssertionError(f"a DataProto or TensorDict is needed to be cut over ranks, not a {type(batch)}")
    from verl.utils.tensordict_utils import chunk_tensordict

    return chunk_tensordict(batch, ranks)


def collect_all_to_all(worker_group: Any, output: list[Any]) -> list[Any]:
    """The answers of all ranks."""
    return output


def collect_dp_compute(worker_group: Any, output: list[Any]) -> list[Any]:
    assert len(output) == worker_group.world_size, f"{len(output)} answers of {worker_group.world_size} ranks"
    return output


def collect_dp_compute_data_proto(worker_group: Any, output: list[Any]) -> Any:
    """The batches of all ranks, joined."""
    from verl.protocol import DataProto
    from verl.utils.tensordict_utils import concat_tensordict

    joined = DataProto.concat if isinstance(output[0], DataProto) else concat_tensordict
    return joined(collect_dp_compute(worker_group, output))


def _no_direct_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a method of mode DIRECT_ROLLOUT_METHOD is called on its worker, not through the group")


def _pair(dispatch_fn: Any, collect_fn: Any) -> dict[str, Any]:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


DISPATCH_MODE_FN_REGISTRY: dict[Any, dict[str, Any]] = {
    Dispatch["RANK_ZERO"]: _pair(dispatch_one_to_all, collect_all_to_all),
    Dispatch["ONE_TO_ALL"]: _pair(dispatch_one_to_all, collect_all_to_all),
    Dispatch["ALL_TO_ALL"]: _pair(dispatch_all_to_all, collect_all_to_all),
    Dispatch["DP_COMPUTE"]: _pair(dispatch_dp_compute, collect_dp_compute),
    Dispatch["DP_COMPUTE_PROTO"]: _pair(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch["DP_COMPUTE_PROTO_WITH_FUNC"]: _pair(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch["DP_COMPUTE_METRIC"]: _pair(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch["DIRECT_ROLLOUT_METHOD"]: _pair(_no_direct_call, _no_direct_call),
}


def get_predefined_dispatch_fn(dispatch_mode: Any) -> dict[str, Any]:
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Any, collect_fn: Any) -> None:
    """A mode of your own: `Dispatch.NAME`."""
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = _pair(dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Any, dispatch_fn: Any, collect_fn: Any) -> None:
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _pair(dispatch_fn, collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Any]:
    """Batches cut over the data-parallel ranks of a mesh: here every rank is one."""
    return _pair(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto)


def register(
    dispatch_mode: Any = Dispatch["ALL_TO_ALL"],
    execute_mode: Any = Execute["ALL"],
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Any], Any]:
    """Decorator: makes a worker's method callable through its group. Without `blocking` the call gives a future."""
    known = isinstance(dispatch_mode, Dispatch) or (
        isinstance(dispatch_mode, dict) and {"dispatch_fn", "collect_fn"} <= dispatch_mode.keys()
    )
    assert known, f"dispatch_mode is a Dispatch, or a dict of dispatch_fn and collect_fn, not {dispatch_mode}"
    assert isinstance(execute_mode, Execute), f"execute_mode is an Execute, not {execute_mode}"
    marks = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args = tuple(_arrived(arg) for arg in args)
                kwargs = {name: _arrived(value) for name, value in kwargs.items()}
            return method(*args, **kwargs)

        @functools.wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await called(*args, **kwargs)

        marked = awaited if inspect.iscoroutinefunction(method) else called
        setattr(marked, MAGIC_ATTR, marks)
        return marked

    return decorate


def _arrived(value: Any) -> Any:
    from verl.protocol import DataProtoFuture

    return value.get() if isinstance(value, DataProtoFuture) else value
