"""How long a step takes, roughly: the work of its stages over the speed of this device, measured for a moment.

Work is counted in multiplications of weights with tokens: 2 x parameters per token forward, 4 more backward. Decoding
reads all weights once per round of tokens, so its speed is the smaller of what memory and multipliers allow. A step of
a small model is mostly overhead, which the constants below hold. The answer is rough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.config import needs_reference
from posttrain.doctor.case import Case
from posttrain.doctor.finding import NOTE, Finding
from posttrain.models.loading import resolve_dtype

AREA = "time"
TRIAL_S = 0.05
EFFICIENCY = 0.45  # share of a bare matrix product's speed that a whole pass reaches
ROUND_S = {"cpu": 1e-3, "cuda": 1.5e-3}  # overhead of one round of decoding
PASS_S = {"cpu": 5e-3, "cuda": 2e-2}  # overhead of one packed pass
LONG_S = 20 * 24 * 3600.0


@dataclass(frozen=True)
class Speed:
    """Multiplications and bytes per second."""

    flops: float
    bytes: float


def measure(device: torch.device, dtype: torch.dtype) -> Speed:
    """Matrix products and copies for a moment."""
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    flops = 2 * size**3 / _seconds(lambda: left @ right, device)
    whole = torch.empty(8 * 2**20 if device.type == "cpu" else 256 * 2**20, device=device, dtype=torch.uint8)
    return Speed(flops, 2 * whole.numel() / _seconds(lambda: whole.clone(), device))


def _seconds(act, device: torch.device) -> float:
    """Of one call, after a first that does not count."""
    act()
    _wait(device)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < TRIAL_S:
        act()
        count += 1
    _wait(device)
    return (time.perf_counter() - started) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check_pace(case: Case) -> Iterator[Finding]:
    """Says the estimate; a run of weeks is worth a note."""
    if case.run is None:
        return
    kind = case.device.kind
    device = torch.device(kind)
    if kind == "cuda" and not torch.cuda.is_available():
        return
    dtype = resolve_dtype(case.model.dtype, device)
    stages = (_rl if case.is_rl else _supervised)(case, measure(device, dtype), dtype.itemsize)
    seconds = sum(stages.values())
    parts = ", ".join(f"{name} {_span(value)}" for name, value in stages.items())
    total = seconds * case.run.steps
    case.report.fact(
        AREA,
        f"A step takes about {_span(seconds)} here if responses reach half their limit ({parts}), the run's "
        f"{case.run.steps} steps about {_span(total)}; a rough estimate."
        if case.is_rl
        else f"A step takes about {_span(seconds)} here, the run's {case.run.steps} steps about {_span(total)}; a "
        "rough estimate.",
    )
    if total > LONG_S:
        yield Finding(
            NOTE, AREA, f"The run would take about {_span(total)}.", "", "trainer.total_training_steps ends it earlier"
        )


def _rl(case: Case, speed: Speed, width: int) -> dict[str, float]:
    config, n = case.config, case.parameters
    data, rollout = config.data, config.actor_rollout_ref.rollout
    lengths = [len(item["prompt_ids"]) for item in case.datasets["train"]]
    prompt, response = sum(lengths) / len(lengths), max(1.0, data.max_response_length / 2)
    prompts, rows = data.train_batch_size, data.train_batch_size * rollout.n
    wave = min(rollout.max_num_seqs, rows)
    flops = EFFICIENCY * speed.flops
    rounds = data.max_response_length * -(-rows // wave)  # the longest response decides
    decode = rounds * (n * width / speed.bytes + ROUND_S[case.device.kind]) + 2 * n * (rows * response) / flops
    tokens = prompts * prompt + rows * response  # a prompt is computed once for all its responses
    forward = 2 * n * tokens / flops
    scored = int(case.run.updates > case.run.steps) + int(needs_reference(config))  # pyright: ignore
    passes = max(1, int(tokens // config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu))
    update = config.actor_rollout_ref.actor.ppo_epochs * 3 * forward
    updates = case.run.updates / max(1, case.run.steps)  # pyright: ignore
    generation = 2 * n * prompts * prompt / flops + decode
    waits = max(0.0, case.scoring_s - generation)  # responses are scored while others are generated
    return {
        "generation": generation,
        **({"waiting for rewards": waits} if waits else {}),
        "log-probs": scored * (forward + passes * PASS_S[case.device.kind]),
        "update": update + (passes + updates) * PASS_S[case.device.kind] + updates * 16 * n / speed.bytes,
    }


def _supervised(case: Case, speed: Speed, width: int) -> dict[str, float]:
    data, items = case.config.data, list(case.datasets["train"])
    each = sum(len(getattr(row, "ids", None) or [*row.chosen, *row.rejected]) for row in items) / len(items)
    tokens = each * min(data.train_batch_size, len(items))
    passes = max(1, int(tokens // data.max_token_len_per_gpu))
    update = 6 * case.parameters * tokens / (EFFICIENCY * speed.flops)
    return {"update": update + passes * PASS_S[case.device.kind] + 16 * case.parameters / speed.bytes}


def _span(seconds: float) -> str:
    for size, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
