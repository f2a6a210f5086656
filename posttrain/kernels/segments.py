"""Packed sequences as trees of segments: where a layer's state goes from one token to the next.

Responses that share a prompt continue from the state behind it. A segment is a run of tokens without a branch; segments
that a layer can compute together form a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.kernels.cuda import to_device

SHORTEST_SHARE = 0.75  # a segment shorter than this share of a group's longest is computed in the next group


@dataclass
class Segment:
    """A run of tokens behind the last token of `parent` (-1: it begins a sequence)."""

    tokens: list[int]
    parent: int
    repeated: int = 0  # first tokens that another segment's output has as well
    children: list[int] = field(default_factory=list)
    depth: int = 0


@dataclass
class SegmentGroup:
    """Segments that are computed together, padded on the right if nothing continues from them."""

    token_BL: torch.Tensor  # padding repeats a segment's last token
    output_N: torch.Tensor  # places among the flattened tokens whose output is wanted
    numbers: list[int]  # of the segments
    parents: list[int] | None  # the segment that each continues from; None: they begin sequences
    has_children: bool  # whether others continue from them


@dataclass
class SegmentPlan:
    """The groups, each behind those that it continues from; `order_T`: each token's place in their joined outputs."""

    groups: list[SegmentGroup]
    order_T: torch.Tensor


def segment_plan(
    lengths: Sequence[int], end_T: np.ndarray | None, device: torch.device, *, can_continue: bool = True
) -> SegmentPlan:
    """Plan for packed sequences of these lengths; `end_T` is the place behind the last token that sees each token.
    Layers that cannot continue from a state compute every response with its whole prompt."""
    tree = _tree(lengths, end_T)
    segments = _push_single_tokens_down(tree) if can_continue else _whole_paths(tree)
    groups, flat = zip(*[_group(segments, numbers, device) for numbers in _together(segments)], strict=True)
    order_T = np.empty(sum(map(len, flat)), np.int64)
    order_T[np.concatenate(flat)] = np.arange(len(order_T))
    return SegmentPlan(list(groups), to_device(torch.from_numpy(order_T), device))


def _tree(lengths: Sequence[int], end_T: np.ndarray | None) -> list[Segment]:
    ends = np.cumsum(lengths)
    if end_T is None:
        return [Segment([*range(end - size, end)], -1) for size, end in zip(lengths, ends.tolist(), strict=True)]
    before_T = np.arange(len(end_T)) - 1  # the token whose state each one continues from
    before_T[ends - np.asarray(lengths)] = -1
    starts = set((ends - np.asarray(lengths)).tolist())
    # Behind a token that the next one does not see, a branch begins: it continues from the last token that it sees.
    for place in np.flatnonzero(end_T[:-1] <= np.arange(1, len(end_T))) + 1:
        if int(place) in starts:
            continue
        seen = int(place) - 1
        while seen >= 0 and end_T[seen] <= place:
            seen = int(before_T[seen])
        before_T[place] = seen
    breaks = np.flatnonzero(before_T != np.arange(len(end_T)) - 1)
    cuts = sorted({0, *starts, *breaks.tolist(), *(before_T[breaks] + 1).tolist()} - {len(end_T)})
    number_T = np.searchsorted(cuts, np.arange(len(end_T)), side="right") - 1
    segments: list[Segment] = []
    for number, (start, end) in enumerate(zip(cuts, [*cuts[1:], len(end_T)], strict=True)):
        seen = int(before_T[start])
        segment = Segment([*range(start, end)], -1 if seen < 0 else int(number_T[seen]))
        if segment.parent >= 0:
            segments[segment.parent].children.append(number)
            segment.depth = segments[segment.parent].depth + 1
        segments.append(segment)
    return segments


def _push_single_tokens_down(segments: list[Segment]) -> list[Segment]:
    # Layers update a state in place when they get one token, which autograd does not allow. Such a token is computed
    # with each of the segments behind it instead; those that nothing continues from are padded.
    for number, segment in enumerate(segments):
        if not segment.children or segment.parent < 0 or len(segment.tokens) > 1:
            continue
        parent = segments[segment.parent]
        parent.children.remove(number)
        for place, child in enumerate(segment.children):
            part = segments[child]
            part.tokens, part.repeated = [*segment.tokens, *part.tokens], int(place > 0)
            part.parent = segment.parent
            parent.children.append(child)
        segment.tokens, segment.children = [], []
    return segments


def _whole_paths(segments: list[Segment]) -> list[Segment]:
    paths, done = [], set[int]()
    for number, segment in enumerate(segments):
        if segment.children:
            continue
        path = [number]
        while segments[path[-1]].parent >= 0:
            path.append(segments[path[-1]].parent)
        tokens = [token for part in reversed(path) for token in segments[part].tokens]
        paths.append(Segment(tokens, -1, sum(len(segments[part].tokens) for part in path if part in done)))
        done.update(path)
    return paths


def _together(segments: list[Segment]) -> list[list[int]]:
    found = []
    for depth in sorted({segment.depth for segment in segments}):
        here = [number for number, segment in enumerate(segments) if segment.depth == depth and segment.tokens]
        kinds: dict[tuple, list[int]] = {}
        for number in here:
            segment = segments[number]
            # The state behind padding is wrong, so segments with children need equal lengths.
            length = len(segment.tokens) if segment.children else 0
            kinds.setdefault((length, segment.parent >= 0), []).append(number)
        for (length, _), numbers in kinds.items():
            if length:
                found.append(numbers)
                continue
            left = sorted(numbers, key=lambda number: -len(segments[number].tokens))
            while left:
                least = SHORTEST_SHARE * len(segments[left[0]].tokens)
                count = sum(len(segments[number].tokens) >= least for number in left)
                found.append(left[:count])
                left = left[count:]
    return found


def _group(segments: list[Segment], numbers: list[int], device: torch.device) -> tuple[SegmentGroup, np.ndarray]:
    # With the tokens whose outputs it gives.
    parts = [segments[number] for number in numbers]
    has_children, begins = bool(parts[0].children), parts[0].parent < 0
    width = max(len(part.tokens) for part in parts)
    width = width if has_children or begins else max(2, width)
    token_BL = np.array([part.tokens + part.tokens[-1:] * (width - len(part.tokens)) for part in parts], np.int64)
    output_N = np.concatenate(
        [np.arange(part.repeated, len(part.tokens)) + row * width for row, part in enumerate(parts)]
    )
    parents = None if begins else [part.parent for part in parts]
    places_BL, places_N = (to_device(torch.from_numpy(array), device) for array in (token_BL, output_N))
    return SegmentGroup(places_BL, places_N, numbers, parents, has_children), token_BL.ravel()[output_N]
