#!/usr/bin/env python3
"""Families of transformers' causal language models, with tiny random weights, against plain transformers.

    python scripts/check_model_families.py                # the table of docs/model_families.md
    python scripts/check_model_families.py bloom mamba    # some of them

Of each family a folder is written, loaded as a run loads it, and compared with the same folder loaded by
`AutoModelForCausalLM` and computed row by row: log-probs of the engines `native` and `hf` (of what they generated),
log-probs of packed and of padded rows, and the losses of RL (clipped, temperature 0.7) and SFT with their gradients.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_families import FAMILIES, write_tiny

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.config.root import OptimConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.errors import UserError
from posttrain.models.loading import load_causal_lm
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate, to_batch

CPU, TEMPERATURE, TOKENS = torch.device("cpu"), 0.7, 6
ALLOWED = 1e-3  # of log-probs, and of losses and gradients as shares


class Words:
    """As much of a tokenizer as an engine needs."""

    pad_token_id = 0

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@dataclass
class Result:
    """What a family's comparison gave; `gaps` by what was compared."""

    kind: str
    refused: str | None = None
    rows: str = ""
    native: str = ""
    hf: str = ""
    gaps: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        if not all(gap <= ALLOWED for gap in self.gaps.values()):
            return "WRONG"
        return "right" if self.rows == "packed" and self.native == "native" else "right by fallback"


def check_family(kind: str, folder: Path) -> Result:
    from transformers import AutoModelForCausalLM

    write_tiny(kind, folder)
    result = Result(kind)
    try:
        model = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU)
    except UserError as error:
        result.refused = str(error)
        return result
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forward_mode = model.forward_mode
    result.rows = "packed" if forward_mode.packed else "padded" if forward_mode.padded else "one by one"
    result.native, result.gaps["native"] = _rollout("native", model, plain)
    result.hf, result.gaps["hf"] = _rollout("hf", model, plain)
    batch = _batch(plain)
    expected = {loss: _plain_loss(plain, batch, loss) for loss in (rl_loss, sft_loss)}
    for name, pack in (("packed", True), ("padded", False)):
        engine = TorchEngine(model, EngineSettings(CPU, optim=OptimConfig(lr=0.0), pack=pack, token_budget=64))
        log_probs = engine.log_probs(batch, temperature=TEMPERATURE)["log_probs"]
        result.gaps[f"{name} log-probs"] = _largest(log_probs, batch.batch["plain_log_probs"])
        for loss, (value, gradients) in expected.items():
            found, ours = _engine_loss(engine, batch, loss)
            result.gaps[f"{name} {loss.__name__}"] = max(abs(found - value) / abs(value), _share(ours, gradients))
    return result


# -- the two losses, of one row or of many --------------------------------------------------------------------------
def rl_loss(data: DataProto, log_probs: torch.Tensor) -> torch.Tensor:
    ratio = (log_probs - data.batch["old_log_probs"]).exp()
    gain = data.batch["advantages"]
    return (-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * data.batch["weights"]).sum()


def sft_loss(data: DataProto, log_probs: torch.Tensor) -> torch.Tensor:
    return (-log_probs * data.batch["weights"]).sum()


def _temperature(loss: Any) -> float:
    return TEMPERATURE if loss is rl_loss else 1.0


def _engine_loss(engine: TorchEngine, batch: DataProto, loss: Any) -> tuple[float, dict[str, torch.Tensor]]:
    shares: list[float] = []

    def share(micro: DataProto, out: dict[str, torch.Tensor]) -> torch.Tensor:
        value = loss(micro, out["log_probs"])
        shares.append(float(value.detach()))
        return value

    engine.runner.gradients(batch, share, _temperature(loss))
    return sum(shares), _gradients(engine.module)


def _plain_loss(plain: Any, batch: DataProto, loss: Any) -> tuple[float, dict[str, torch.Tensor]]:
    total = 0.0
    for number in range(len(batch)):
        row = batch[[number]]
        value = loss(row, _plain_log_probs(plain, row, _temperature(loss)))
        value.backward()
        total += float(value.detach())
    return total, _gradients(plain)


def _gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: w.grad.clone() for name, w in module.named_parameters() if w.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def _share(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """How far the gradients are apart, as a share of their length."""
    gap = sum(float((ours.get(name, torch.zeros_like(g)) - g).square().sum()) for name, g in theirs.items())
    gap += sum(float(g.square().sum()) for name, g in ours.items() if name not in theirs)
    return (gap / sum(float(g.square().sum()) for g in theirs.values())) ** 0.5


# -- plain transformers, one row at a time ---------------------------------------------------------------------------
def _plain_log_probs(plain: Any, row: DataProto, temperature: float) -> torch.Tensor:
    """(1, R) of the one row's response."""
    width, mask = row.batch["responses"].shape[1], row.batch["attention_mask"][0].bool()
    ids, count = row.batch["input_ids"][0][mask], int(mask[-width:].sum())
    found = _row_log_probs(plain, ids, temperature)[-count:]
    return torch.nn.functional.pad(found, (0, width - count))[None]


def _row_log_probs(plain: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1).gather(-1, ids[1:, None]).squeeze(-1)


def _batch(plain: Any) -> DataProto:
    """Two prompts with three responses each, of many lengths; old log-probs near the present ones."""
    generator = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 320, (count,), generator=generator).tolist()

    prompts = [prompt for prompt in (draw(9), draw(4)) for _ in range(3)]
    responses = [Output(number, draw(count), [0.0] * count, "stop") for number, count in enumerate((5, 8, 1, 3, 11, 2))]
    batch = to_batch(prompts, responses, 0)
    with torch.no_grad():
        log_probs = torch.cat([_plain_log_probs(plain, batch[[row]], TEMPERATURE) for row in range(len(batch))])
    mask = batch.batch["response_mask"].float()
    noise = torch.randn(log_probs.shape, generator=generator) * 0.2
    advantages = torch.randn(len(batch), 1, generator=generator).expand_as(log_probs)
    tensors = {
        "plain_log_probs": log_probs,
        "old_log_probs": log_probs + noise * mask,
        "advantages": advantages.clone(),
        "weights": mask / mask.sum(),
    }
    return batch.union(DataProto.from_dict(tensors=tensors))


def _rollout(name: str, model: Any, plain: Any) -> tuple[str, float]:
    """(the engine that was taken, the largest gap between its log-probs and those of plain transformers)."""
    engine, said = build_engine(RolloutConfig(name=name), model, Words())
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 320, (count,), generator=generator).tolist() for count in (9, 4, 13)]
    prompts = [prompt for prompt in prompts for _ in range(2)]
    sampling = [Sampling(max_tokens=TOKENS - number % 3) for number in range(len(prompts))]
    gaps = []
    for prompt, output in zip(prompts, generate(engine, prompts, sampling, list(range(len(prompts)))), strict=True):
        with torch.no_grad():
            expected = _row_log_probs(plain, torch.tensor([*prompt, *output.token_ids]), 1.0)
        gaps.append(_largest(torch.tensor(output.log_probs), expected[-len(output.token_ids) :]))
    mode = getattr(engine, "mode", "cache")
    return said.split(" ")[0] + ("" if mode == "cache" else f", {mode}"), max(gaps)


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


def table(results: list[Result]) -> str:
    lines = [
        "| family | verdict | training rows | `native` becomes | `hf` becomes | log-probs of rollout | of training | "
        "RL loss and gradient | SFT loss and gradient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        gaps = each.gaps
        if each.refused:
            lines.append(f"| `{each.kind}` | refused: {each.refused.partition(': ')[2]} |" + " |" * 7)
            continue
        columns = [("native", "hf"), ("log-probs",), ("rl_loss",), ("sft_loss",)]
        largest = [max(gap for name, gap in gaps.items() if name.endswith(ends)) for ends in columns]
        cells = [f"`{each.kind}`", each.verdict, each.rows, each.native, each.hf, *(f"{gap:.0e}" for gap in largest)]
        lines.append(f"| {' | '.join(cells)} |")
    counts = {}
    for each in results:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return "\n".join(lines)


def main(kinds: list[str]) -> int:
    from transformers import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    results = []
    for kind in kinds or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results.append(check_family(kind, Path(folder)))
            except Exception as error:  # a family that breaks must not hide the others
                print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                results.append(
                    Result(kind, gaps={name: float("nan") for name in ("hf", "log-probs", "rl_loss", "sft_loss")})
                )
        print(f"{kind}: {results[-1].verdict}", file=sys.stderr, flush=True)
    print(table(results))
    return int(any(each.verdict == "WRONG" for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
