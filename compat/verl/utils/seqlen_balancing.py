"""Rows dealt into parts of equal work: over ranks, or into micro-batches under a limit of tokens."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from typing import Any

import torch

from verl.utils.tensordict_utils import index_select_tensor_dict


def calculate_workload(seqlen_list: Any) -> Any:
    """The work of a row: its length for the layers, its square for attention, in the proportion of a 7B model."""
    return seqlen_list * (24576 + seqlen_list)


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The largest differencing method: the two partial divisions that differ most are laid over each other, the
    fullest part of one on the emptiest of the other, until one is left."""
    order = sorted(range(len(seqlen_list)), key=lambda row: (seqlen_list[row], row))
    if equal_size:
        assert len(order) % k_partitions == 0, f"{len(order)} rows cannot be cut into {k_partitions} equal parts"
        starts = [order[begin : begin + k_partitions] for begin in range(0, len(order), k_partitions)]
    else:
        starts = [[row] for row in order]
    heap: list[Any] = []
    for rows in starts:
        parts = [(int(seqlen_list[row]), [row]) for row in rows] + [(0, [])] * (k_partitions - len(rows))
        heapq.heappush(heap, _division(parts))
    while len(heap) > 1:
        (*_, left), (*_, right) = heapq.heappop(heap), heapq.heappop(heap)
        laid = [(a + b, rows + more) for (a, rows), (b, more) in zip(left, reversed(right), strict=True)]
        heapq.heappush(heap, _division(laid))
    return [rows for _, rows in heap[0][-1]]


def _division(parts: list[tuple[int, list[int]]]) -> Any:
    """A partial division for the heap: the one with the largest difference comes first."""
    parts = sorted(parts, key=lambda part: (-part[0], part[1]))
    return (parts[-1][0] - parts[0][0], min(rows[0] for _, rows in parts if rows), parts)


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`k_partitions` lists of row numbers with nearly equal sums; with `equal_size` also equally many rows."""
    assert len(seqlen_list) >= k_partitions, f"{len(seqlen_list)} rows cannot fill {k_partitions} parts"
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(parts), "a part is empty"
    return parts


def log_seqlen_unbalance(seqlen_list: Sequence[int], partitions: list[list[int]], prefix: str) -> dict[str, Any]:
    """The sums of the parts before (rows in order) and after balancing."""
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[start : start + size]) for start in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / len(partitions),
    }


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of `b` from `a` on."""
    return ceildiv(a, b) * b


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """(micro-batches of at most `max_token_len` tokens, the rows of each). `force_group_size` rows stay together; with
    `dp_group` all ranks make equally many."""
    lengths = _lengths(batch)
    assert len(lengths) % force_group_size == 0, f"{len(lengths)} rows are no groups of {force_group_size}"
    groups = [range(start, start + force_group_size) for start in range(0, len(lengths), force_group_size)]
    tokens = [sum(lengths[row] for row in group) for group in groups]
    work = [sum(int(calculate_workload(lengths[row])) for row in group) for group in groups]
    if max(tokens) > max_token_len:
        raise ValueError(f"rows that stay together have {max(tokens)} tokens, more than max_token_len={max_token_len}")
    step = num_batches_divided_by or 1
    count = max(min(len(groups), ceildiv(sum(tokens), max_token_len)), min_num_micro_batch or 1)
    shared = dp_group if same_micro_num_in_dp and torch.distributed.is_initialized() else None
    count = roundup_divisible(_most(count, shared), step)
    while True:
        if count > len(groups):
            raise ValueError(f"{len(groups)} groups of rows cannot fill {count} micro-batches")
        parts = get_seqlen_balanced_partitions(work, count, equal_size=False)
        too_long = any(sum(tokens[group] for group in part) > max_token_len for part in parts)
        if not _most(int(too_long), shared):
            break
        count += step
    if use_dynamic_bsz_balance:  # the smallest at both ends, where a pipeline fills and empties
        parts.sort(key=lambda part: (sum(work[group] for group in part), part[0]), reverse=True)
        parts = parts[::2][::-1] + parts[1::2]
    rows = [[row for group in part for row in groups[group]] for part in parts]
    return [index_select_tensor_dict(batch, part) for part in rows], rows


def _lengths(batch: Any) -> list[int]:
    ids = batch["input_ids"] if "input_ids" in batch.keys() else None
    if ids is not None and ids.is_nested:
        return ids.offsets().diff().tolist()
    return batch["attention_mask"].sum(dim=1).tolist()


def _most(value: int, group: Any) -> int:
    """The largest of any rank of the group; without one the value itself."""
    if group is None:
        return value
    from verl.utils.device import get_device_name

    found = torch.tensor([value], device=get_device_name())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(found)


def greedy_partition(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Rows dealt one by one, in their order, to the part with the fewest tokens (or the fewest rows if parts have to
    be of equal size)."""
    # A bias larger than all tokens together makes the number of rows decide first.
    bias = sum(seqlen_list) + 1 if equal_size else 0
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    loads = [0] * k_partitions
    for row, length in enumerate(seqlen_list):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += length + bias
    if equal_size:
        assert all(len(part) * k_partitions == len(seqlen_list) for part in parts), (
            "parts of equal size are not possible"
        )
    return parts


def balanced_chunk_range(num_items: int, num_chunks: int, chunk_idx: int) -> tuple[int, int]:
    """(begin, end) of one of the chunks that share the items in order; the first ones have one more where they do not
    divide."""
    if num_chunks <= 0 or not 0 <= chunk_idx < num_chunks:
        raise ValueError(f"there is no chunk {chunk_idx} of {num_chunks}")
    size, more = divmod(num_items, num_chunks)
    begin = chunk_idx * size + min(chunk_idx, more)
    return begin, begin + size + (chunk_idx < more)


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Where each of the numbers stands."""
    places = {number: place for place, number in enumerate(idx_map)}
    return [places[number] for number in range(len(idx_map))]


def prepare_dynamic_batch(data: Any, max_token_len: int, **kwargs: Any) -> tuple[list[Any], list[list[int]]]:
    """As `rearrange_micro_batches`, for a DataProto with its arrays."""
    _, rows = rearrange_micro_batches(data.batch, max_token_len, **kwargs)
    parts = [data.select_idxs(part) for part in rows]
    for part in parts:
        part.meta_info = copy.deepcopy(data.meta_info)
    return parts, rows


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """The rows in the order that they had before micro-batches were made."""
    order = [row for part in batch_idx_list for row in part]
    assert len(order) == data.shape[0], f"{data.shape[0]} rows for {len(order)} places"
    back = get_reverse_idx(order)
    if data.is_nested:
        rows = data.unbind()
        return torch.nested.as_nested_tensor([rows[place] for place in back], layout=torch.jagged)
    return data[torch.tensor(back, device=data.device)]


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Any], k_partitions: int
) -> list[list[int]]:
    """Rows in `k_partitions` parts of equally many groups and about equal work; neighbours of one uid stay together."""
    assert len(seqlen_list) == len(uid_list), "seqlen_list and uid_list must have same length"
    groups: list[list[int]] = []
    for row, uid in enumerate(uid_list):
        if row == 0 or uid != uid_list[row - 1]:
            groups.append([])
        groups[-1].append(row)
    assert len(groups) >= k_partitions, (
        f"Number of uid groups ({len(groups)}) must be >= k_partitions ({k_partitions})."
    )
    work = [sum(int(calculate_workload(torch.tensor([seqlen_list[row]]))) for row in group) for group in groups]
    parts = get_seqlen_balanced_partitions(work, k_partitions, equal_size=True)
    return [sorted(row for group in part for row in groups[group]) for part in parts]
