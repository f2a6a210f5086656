"""Tensor functions under verl's names: masked statistics, log-probs and entropy, padding, schedules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.algorithms.common import keep_masked

# -- under a mask -----------------------------------------------------------------------------------------------------


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    """The sum of values x mask; what stands outside the mask, NaN too, counts as 0."""
    return (keep_masked(values, mask) * mask).sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + 1e-8)


def distributed_masked_mean(local_tensor: torch.Tensor, local_mask: torch.Tensor) -> torch.Tensor:
    """The mean of what the mask marks over all ranks; of this process alone where there is no process group."""
    total, count = (local_tensor * local_mask).sum(), local_mask.sum()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(count)
    return total / count


def distributed_mean_max_min_std(
    local_tensor: torch.Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(mean, largest, smallest, standard deviation of a sample) over all ranks; None for what is not wanted."""

    def over_ranks(value: torch.Tensor, how: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(value, op=how)
        return value

    count = over_ranks(torch.tensor(local_tensor.numel(), device=local_tensor.device))
    mean = over_ranks(local_tensor.sum()) / count
    largest = over_ranks(local_tensor.max(), torch.distributed.ReduceOp.MAX) if compute_max else None
    smallest = over_ranks(local_tensor.min(), torch.distributed.ReduceOp.MIN) if compute_min else None
    spread = torch.sqrt(over_ranks(((local_tensor - mean) ** 2).sum()) / (count - 1)) if compute_std else None
    return mean, largest, smallest, spread


def expand_as_nested(tensor: torch.Tensor, nested_tensor: Any) -> torch.Tensor:
    """A value per row, repeated for every token that the row has in the nested tensor."""
    assert nested_tensor.is_nested, "nested_tensor must be nested"
    assert nested_tensor.dim() == 2, "nested_tensor must have rows of tokens"
    assert tensor.dim() == 1 and len(tensor) == nested_tensor.shape[0], "tensor must have one value per row"
    offsets = nested_tensor.offsets()
    return torch.nested.nested_tensor_from_jagged(tensor.repeat_interleave(offsets.diff()), offsets=offsets)


def masked_var(values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """The variance under the mask, of a sample (n - 1) unless told otherwise."""
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"a sample variance needs at least 2 values, and the mask leaves {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(values - mean) / sqrt(variance + 1e-8), with the statistics of the mask; the mean stays if not `shift_mean`."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: torch.Tensor, tensor_min: Any, tensor_max: Any) -> torch.Tensor:
    """Clamped between two tensors."""
    return torch.clamp(x, torch.as_tensor(tensor_min), torch.as_tensor(tensor_max))


def get_response_mask(response_id: torch.Tensor, eos_token: int | list[int] = 2, dtype: Any = torch.int64) -> Any:
    """1 up to and with the first end token of each row, 0 after it."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(dim=1) - ends == 0).to(dtype)


# -- logits -----------------------------------------------------------------------------------------------------------


def gather_from_labels(data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The entry of each label along the last dimension."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """log softmax(logits)[label]; `inplace_backward` is verl's and changes nothing here."""
    if logits.dtype in (torch.float32, torch.float64):
        return gather_from_labels(logits, labels) - torch.logsumexp(logits, dim=-1)
    return logprobs_from_logits_naive(logits, labels)


def logprobs_from_logits_naive(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return gather_from_labels(F.log_softmax(logits, dim=-1), labels)


logprobs_from_logits_v2 = logprobs_from_logits


def log_probs_from_logits_response(input_ids: torch.Tensor, logits: torch.Tensor, response_length: int) -> Any:
    """Log-probs of the last `response_length` tokens, from the logits of whole rows."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of softmax(logits) along the last dimension."""
    return torch.logsumexp(logits, dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def entropy_from_logits_with_chunking(logits: torch.Tensor, chunk_size: int = 2048) -> torch.Tensor:
    """The same in float32, for so many rows at a time."""
    return torch.cat([entropy_from_logits(part.float()) for part in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """The sum of all squared probabilities."""
    return logits.softmax(dim=-1).square().sum(dim=-1)


def post_process_logits(input_ids: Any, logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> Any:
    """Logits over the temperature, in place; filters are the rollout's."""
    if top_k > 0 or top_p < 1:
        raise NotImplementedError("top-k and top-p are applied by the rollout: actor_rollout_ref.rollout.top_k, top_p")
    return logits.div_(temperature) if temperature != 1.0 else logits


# -- rows of different length -----------------------------------------------------------------------------------------


def pad_2d_list_to_length(response: Any, pad_token_id: int, max_length: int | None = None) -> torch.Tensor:
    """Lists of token ids as one tensor, padded on the right to the longest, or to `max_length` if that is more."""
    width = max([len(row) for row in response] + [max_length or 0])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(tensors: torch.Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Any:
    """(rows, length) padded to a length; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with exactly `max_length` columns: padded, or cut at the side that `truncation` names."""
    assert truncation in ("left", "right", "middle", "error") and input_ids.ndim == 2
    length = input_ids.shape[-1]
    if length < max_length:
        pads = pad_token_id, 0
        ids, mask = (
            pad_sequence_to_length(part, max_length, pad, left_pad)
            for part, pad in zip((input_ids, attention_mask), pads, strict=True)
        )
        return ids, mask
    if length == max_length:
        return input_ids, attention_mask
    if truncation == "error":
        raise NotImplementedError(
            f"{length} tokens are more than max_length={max_length}: raise it, or truncate (left, right or middle)"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    kept = [*range(head), *range(length - (max_length - head), length)]
    return input_ids[:, kept], attention_mask[:, kept]


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A text as (input_ids, attention_mask) of one row and `max_length` columns."""
    made = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(made["input_ids"], made["attention_mask"], max_length, pad_token_id, left_pad, truncation)


def remove_pad_token(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """Rows without their padding on the left."""
    return [ids[int((mask == 0).sum()) :].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """A TensorDict in parts of equal size."""
    assert tensors.batch_size[0] % batch_size == 0, f"{tensors.batch_size[0]} rows are not a multiple of {batch_size}"
    return list(tensors.split(batch_size))


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(places of the real tokens in the flat batch, where each row begins among them, the longest row)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    begins = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return attention_mask.flatten().nonzero().flatten(), begins, int(lengths.max())


# -- training ---------------------------------------------------------------------------------------------------------


def compute_grad_norm(model: torch.nn.Module) -> float:
    """The sum of all squared gradients (not its root)."""
    return sum(float(p.grad.detach().square().sum()) for p in model.parameters() if p.grad is not None)


def get_cosine_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
    zero_indexed_step: bool = True,
) -> Any:
    """Rises in a line from `init_lr_ratio` to the optimizer's rate, then falls in a cosine to `min_lr_ratio` of it."""
    low, first = min_lr_ratio or 0.0, init_lr_ratio or 0.0

    def factor(step: int) -> float:
        step += not zero_indexed_step
        if step < num_warmup_steps:
            return first + (1 - first) * step / max(1, num_warmup_steps)
        share = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = (1 + math.cos(2 * math.pi * num_cycles * share)) / 2
        return max(low, low + (1 - low) * wave)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule_with_warmup(optimizer: Any, num_warmup_steps: int, last_epoch: int = -1) -> Any:
    """Rises in a line to the optimizer's rate and stays there."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / num_warmup_steps if step < num_warmup_steps else 1.0, last_epoch
    )
