"""A pass through this rank's layers: from token ids, or from what the stage before gave, to hidden states or outputs.

Megatron-Core's own attention over packed rows needs TransformerEngine, so `PackedAttention` takes its place.

A pass is cut by tokens in two ways. Context ranks have a stretch of them each, and exchange heads for tokens where they
attend (`kernels/sequence_parallel.py`). With sequence parallelism, the tensor ranks of one stretch cut it once more
between the matrices of a layer, where all of them would otherwise hold the same numbers.

Shapes: T packed tokens, H heads, D head size, E hidden size, U places whose hidden state is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from posttrain.engine.heads import Head
from posttrain.engine.megatron.groups import RankGroups
from posttrain.engine.megatron.package import buffers_on
from posttrain.engine.packing import Rows, with_a_prediction
from posttrain.engine.pipeline import Pipeline
from posttrain.engine.runner import Stage
from posttrain.kernels import train
from posttrain.kernels.logprob_head import chunk_elements, logprob_head
from posttrain.kernels.packed_attention import active_layout, packed_rows
from posttrain.kernels.sequence_parallel import gathered, own_stretch, shared_sequence, stretch_attention
from posttrain.models.forward import at_places_of_ranks


class PackedAttention(torch.nn.Module):
    """Megatron-Core's `core_attention` by posttrain's kernels; every pass opens `packed_rows` around it."""

    def __init__(self, *_: Any, scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(T, 1, H x D) from (T, 1, H, D): one sequence that holds all rows, or this rank's stretch of it."""
        layout = active_layout()
        assert layout is not None, "rows of this engine are packed"
        query, key, value = (x[:, 0] for x in (query, key, value))
        if layout.turned_by is not None:
            query, key, value = train.Rotated.apply(query, key, value, *layout.turned_by)  # pyright: ignore
        return stretch_attention(query, key, value, layout, scale=self.scale).flatten(1)[:, None]


class MegatronStage(Stage):
    """Megatron-Core's modules of one stage, called one after another on packed rows."""

    module: Any  # a `GPTModel` of megatron.core, which has no types

    def __init__(
        self,
        module: Any,
        config: Any,
        groups: RankGroups,
        pipeline: Pipeline,
        head: Head,
        angles_D: torch.Tensor,
        *,
        chunks: Sequence[slice],
        device: torch.device,
        padding: int | None,
        recompute: bool,
        rotates: bool,
    ) -> None:
        """`angles_D` is what each position turns the pairs of a head by: `rotates` lets `PackedAttention` do that;
        `chunks` are the parts of this rank's layers that a pass goes through one at a time; `padding` is the token
        whose embedding learns nothing where it is read, as in Hugging Face's models."""
        self.module, self.config, self.groups, self.pipeline, self.head = module, config, groups, pipeline, head
        self.angles_D, self.device = angles_D.to(device, torch.float32), device
        self.chunks, self.padding, self.recompute = chunks, padding, recompute
        self.rotates = rotates

    @contextmanager
    def computing(self, rows: Rows) -> Iterator[None]:
        context = self.groups.context if self.groups.context.size() > 1 else None
        with packed_rows(rows.layout), shared_sequence(context), buffers_on(self.device):
            yield

    def prepare_rows(self, rows: Rows) -> Rows:
        return with_a_prediction(rows)

    def tokens(self, rows: Rows) -> int:
        # Equally many on all ranks that cut a pass: the last ones are filled up.
        return -(-rows.input_ids.shape[1] // self._cuts())

    def _cuts(self) -> int:
        return self.groups.context.size() * (self.groups.tensor.size() if self.groups.sizes.sequence else 1)

    def forward(self, rows: Rows, arrived: torch.Tensor | None, temperature: float, chunk: int = 0) -> Any:
        """Hidden states (T, 1, E) for the next chunk of layers; from the last one, numbers (U,) by name."""
        fill = self.tokens(rows) * self._cuts() - rows.input_ids.shape[1]
        ids_T, position_T = (
            own_stretch(torch.nn.functional.pad(x[0], (0, fill)), self.groups.context)
            for x in (rows.input_ids, rows.position_ids)
        )
        hidden = self._embedded(ids_T) if arrived is None else arrived
        half = position_T[:, None].float() * self.angles_D
        rotation = torch.cat([half, half], -1)[:, None, None]
        if self.rotates and train.can_train(hidden):
            # One kernel where Megatron-Core takes a dozen, which the host has to launch for every layer.
            assert rows.layout is not None, "rows of this engine are packed"
            angles_TD = rotation[:, 0, 0]
            rows.layout.turned_by = angles_TD.cos().to(hidden.dtype), angles_TD.sin().to(hidden.dtype)
            rotation = None
        for layer in self.module.decoder.layers[self.chunks[chunk]]:
            if self.recompute and torch.is_grad_enabled():
                # Nothing random happens in a layer, so that its recomputation needs no random state of before.
                hidden = checkpoint(_through, layer, hidden, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _through(layer, hidden, rotation)
        if not self.pipeline.gives_outputs(chunk):
            return hidden
        assert isinstance(hidden, torch.Tensor)
        hidden_TE = self.module.decoder.final_layernorm(hidden)[:, 0]
        if self.groups.sizes.sequence:
            # All tensor ranks compute the same from here on, or sum its gradient themselves.
            hidden_TE = gathered(hidden_TE, self.groups.tensor)

        def outputs(hidden_UE: torch.Tensor, which_U: torch.Tensor | None) -> dict[str, torch.Tensor]:
            if self.head.projection is not None:
                (name,), values_U = self.head.outputs, getattr(self.module, self.head.projection)(hidden_UE)[:, 0]
                return {name: values_U.to(torch.promote_types(values_U.dtype, torch.float32))}
            log_probs_U, entropy_U = vocabulary_parallel_log_probs(
                hidden_UE,
                self.module.output_layer.weight,
                rows.label_U if which_U is None else rows.label_U[which_U],
                temperature=temperature,
                vocabulary=self.config.vocab_size,
                group=self.groups.tensor,
            )
            return {"log_probs": log_probs_U, "entropy": entropy_U}

        places_U = self.head.places(rows)
        if self.groups.context.size() > 1:
            return at_places_of_ranks(hidden_TE, places_U, outputs, self.groups.context)
        return outputs(hidden_TE.index_select(0, places_U), None)

    def _embedded(self, ids_T: torch.Tensor) -> torch.Tensor:
        # Not by Megatron-Core's module around the table: its dropout needs CUDA's random state even when it is off.
        hidden = self.module.embedding.word_embeddings(ids_T[None])
        if self.groups.sizes.sequence:
            ids_T = own_stretch(ids_T, self.groups.tensor)
        else:
            hidden = hidden.transpose(0, 1)
        if self.padding is None:
            return hidden
        return torch.where((ids_T == self.padding)[:, None, None], hidden.detach(), hidden)


def _through(layer: Any, hidden: Any, rotation: torch.Tensor | None) -> torch.Tensor:
    return layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotation)[0]


class _VocabularyParallelHead(torch.autograd.Function):
    """Log-probs and entropies of given tokens where every tensor rank holds a part of the vocabulary.

    As `kernels/logprob_head.py`, a chunk of tokens at a time: no rank ever has logits of the whole vocabulary. Ranks
    exchange the largest score of each token, and then three sums. Shapes: N tokens, E hidden size, V tokens of this
    rank.
    """

    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, labels_N, temperature, chunks, group):
        """`labels_N` are counted from this rank's first token: others are below 0 or V and above."""
        parts = [_statistics(hidden_NE[c], weight_VE, labels_N[c], temperature, group) for c in chunks]
        logp_N, entropy_N, logsum_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.temperature, ctx.chunks, ctx.group = temperature, chunks, group
        ctx.save_for_backward(hidden_NE, weight_VE, labels_N, logsum_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NE, weight_VE, labels_N, logsum_N, entropy_N = ctx.saved_tensors
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_NE, dtype=wide)
        grad_weight = torch.zeros_like(weight_VE, dtype=wide)
        for c in ctx.chunks:
            # With p = softmax(s): d log p(label)/ds = onehot - p, and d entropy/ds = -p (log p + entropy). Logits are
            # computed again instead of kept: they are the largest tensor of a pass.
            log_p = _scores(hidden_NE[c], weight_VE, ctx.temperature).sub_(logsum_N[c, None])
            grad = log_p.exp() * -(grad_logp_N[c, None] + grad_entropy_N[c, None] * (log_p + entropy_N[c, None]))
            own = _own(labels_N[c], len(weight_VE))
            grad.scatter_add_(1, labels_N[c].clamp(0, len(weight_VE) - 1)[:, None], (grad_logp_N[c] * own)[:, None])
            narrow = grad.div_(ctx.temperature).to(hidden_NE.dtype)
            grad_hidden[c] = (narrow @ weight_VE).to(wide)
            grad_weight += (narrow.T @ hidden_NE[c]).to(wide)
        dist.all_reduce(grad_hidden, group=ctx.group)  # each rank has the share of its part of the vocabulary
        return grad_hidden.to(hidden_NE.dtype), grad_weight.to(weight_VE.dtype), None, None, None, None


def _scores(hidden_NE: torch.Tensor, weight_VE: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden_NE @ weight_VE.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _own(labels_N: torch.Tensor, tokens: int) -> torch.Tensor:
    return (labels_N >= 0) & (labels_N < tokens)


def _statistics(hidden_NE, weight_VE, labels_N, temperature, group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(hidden_NE, weight_VE, temperature)
    highest_N = scores.amax(-1)
    # The same maximum on all ranks keeps exp() in range and lets sums of powers simply be added.
    dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
    powers = (scores - highest_N[:, None]).exp_()
    said_N = scores.gather(1, labels_N.clamp(0, len(weight_VE) - 1)[:, None]).squeeze(1) * _own(
        labels_N, len(weight_VE)
    )
    # One message for three sums: latency, not size, is what a small message costs.
    sums = torch.stack([powers.sum(-1), (powers * scores).sum(-1), said_N])
    dist.all_reduce(sums, group=group)
    logsum_N = highest_N + sums[0].log()
    return sums[2] - logsum_N, logsum_N - sums[1] / sums[0], logsum_N


def vocabulary_parallel_log_probs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies), each (N,); `weight_VE` is this rank's part, filled up with rows that are no tokens."""
    first = group.rank() * len(weight_VE)
    weight_VE = weight_VE[: max(0, vocabulary - first)]
    if group.size() == 1:
        return logprob_head(hidden_NE, weight_VE, labels_N, temperature=temperature)
    size = max(1, chunk_elements(hidden_NE.device) // len(weight_VE))
    chunks = [slice(start, start + size) for start in range(0, len(hidden_NE), size)]
    return _VocabularyParallelHead.apply(hidden_NE, weight_VE, labels_N - first, temperature, chunks, group)  # pyright: ignore
