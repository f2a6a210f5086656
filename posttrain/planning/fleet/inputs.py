"""What a fleet's plan is computed from: rates of the hardware, and what a step costs of a model.

Each rate names its origin; `--assume name=value` replaces one. A measured rate was measured on one H200 by the command
that its page names. Nothing between GPUs was measured: rates of links are those of data sheets. A model's numbers are
read off its code on the meta device; some models are known by the name of their size.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from posttrain.errors import UserError
from posttrain.models.forward import without_adapters
from posttrain.models.recurrent import attending_layers, state_bytes
from posttrain.models.shards import own_key_heads
from posttrain.planning.counting import cached_heads
from posttrain.rollout.native.build import bytes_per_token
from posttrain.spelling import closest

SHEET = "assumed: data sheet"


@dataclass(frozen=True)
class Constant:
    """A rate in `unit`; `origin` says where it comes from."""

    value: float
    unit: str
    meaning: str
    origin: str


def _measured(where: str) -> str:
    return f"measured, one H200: {where}"


DEFAULTS: dict[str, Constant] = {
    "peak_tflops": Constant(989, "TFLOP/s", "dense bfloat16 products of a GPU", f"{SHEET} of an H200"),
    "hbm_tb_s": Constant(4.8, "TB/s", "memory of a GPU", f"{SHEET} of an H200"),
    "nvlink_gb_s": Constant(450, "GB/s", "between GPUs of a machine, each way", f"{SHEET} of NVLink 4"),
    "network_gb_s": Constant(50, "GB/s", "between machines, of each GPU, each way", "assumed: 400 Gbit/s a GPU"),
    "link_share": Constant(0.8, "", "of a link's rate that a collective reaches", "assumed"),
    "link_us": Constant(20, "us", "latency of a collective", "assumed"),
    "driver_gb_s": Constant(1.25, "GB/s", "network of the driver's machine", "assumed: 10 Gbit/s"),
    "text_bytes": Constant(4, "B", "text of a token, which a reward function reads", "assumed"),
    "update_share_896": Constant(0.462, "", "of peak in an update, width 896", _measured("docs/gpu.md, 0.5B")),
    "update_share_1536": Constant(0.542, "", "the same, width 1536", _measured("docs/gpu.md, 1.5B")),
    "update_share_3584": Constant(0.59, "", "the same, width 3584 and above", _measured("docs/gpu.md, 7B with LoRA")),
    "decode_share_896": Constant(
        0.55, "", "of peak in products of decoding, width 896", _measured("docs/gpu.md, 0.5B")
    ),
    "decode_share_3584": Constant(0.70, "", "the same, width 3584 and above", _measured("docs/gpu.md, 7B")),
    "cache_share": Constant(0.9, "", "of hbm_tb_s in decode attention", _measured("docs/gpu.md, 0.5B and 7B")),
    "weight_share": Constant(0.7, "", "of hbm_tb_s where few rows read weights", _measured("docs/gpu.md, 7B x 16k")),
    "layer_us": Constant(25, "us", "least time of a layer besides, captured", _measured("docs/gpu.md, 0.5B x 32k")),
    "row_passes": Constant(
        33, "", "times that a decode step reads a hidden state in a layer", _measured("docs/gpu.md")
    ),
    "launch_us": Constant(100, "us", "of a layer whose kernels the host launches (split native)", "assumed"),
    "serving_us": Constant(
        40.6, "us", "of vLLM's host for a sequence and step", _measured("docs/gpu.md, 24,641 tok/s")
    ),
    "serving_ratio": Constant(
        1.36, "", "vLLM's decode step to ours", _measured("docs/gpu.md, a mixture, 512 sequences")
    ),
    "bucket_gb_s": Constant(142, "GB/s", "buckets of 256 MiB", _measured("docs/weight_sync.md, CUDA IPC")),
    "gloo_gb_s": Constant(1.9, "GB/s", "with weight_sync=gloo", _measured("docs/weight_sync.md")),
    "driver_us": Constant(220, "us", "of the driver's core for a response", "measured: docs/workers_in_operation.md"),
    "driver_bytes": Constant(850, "B", "through the driver for a response", "measured: docs/workers_in_operation.md"),
}


@dataclass
class Constants:
    """The constants of one plan; `used` are those that it has read."""

    table: dict[str, Constant]
    used: set[str] = field(default_factory=set)

    @classmethod
    def given(cls, assumed: Mapping[str, float] | None = None) -> Constants:
        table = dict(DEFAULTS)
        for name, value in (assumed or {}).items():
            if name not in table:
                near = closest(name, table)
                hint = f"; did you mean {near}?" if near else ""
                raise UserError(f"--assume {name}: no constant of this name{hint}\n  There are {', '.join(table)}")
            if not 0 < value < math.inf:
                raise UserError(f"--assume {name}={value:g}: give a number above 0")
            table[name] = replace(table[name], value=value, origin="given by --assume")
        return cls(table)

    def __getitem__(self, name: str) -> float:
        """In SI units: FLOP/s, bytes/s, seconds."""
        self.used.add(name)
        found = self.table[name]
        scale = {"TFLOP/s": 1e12, "TB/s": 1e12, "GB/s": 1e9, "us": 1e-6}.get(found.unit, 1.0)
        return found.value * scale

    def by_width(self, name: str, width: int) -> float:
        """A share that was measured at several widths: between them by the logarithm, outside the nearest."""
        widths = sorted(int(key.rpartition("_")[2]) for key in self.table if key.startswith(name))
        shares = [self[f"{name}_{one}"] for one in widths]
        above = bisect_left(widths, width)
        if above in (0, len(widths)):
            return shares[min(above, len(widths) - 1)]
        low, high = widths[above - 1], widths[above]
        part = math.log(width / low) / math.log(high / low)
        return shares[above - 1] + part * (shares[above] - shares[above - 1])

    def lines(self) -> list[str]:
        """Those that were used, with their origin."""
        rows = [
            (name, f"{c.value:g} {c.unit}".strip(), c.meaning, c.origin)
            for name, c in self.table.items()
            if name in self.used
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return [
            "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]


def parse_assumed(texts: Sequence[str]) -> dict[str, float]:
    """`name=value` of `--assume`."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise UserError(f"--assume {text}: give name=number, for example network_gb_s=25") from None
    return found


LONG = 131072  # positions
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
TEAMS = (1, 2, 4, 8)  # ranks of an engine that are tried


def _decoder(kind: str, width: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any):
    return {
        "model_type": kind,
        "architectures": [{"qwen2": "Qwen2", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}[kind] + "ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "max_position_embeddings": LONG,
        "tie_word_embeddings": False,
        **more,
    }


def _mixture(width: int, inner: int, layers: int, heads: int, keys: int, expert: int):
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    return _decoder("qwen3_moe", width, inner, layers, heads, keys, 151936, head_dim=128, **experts)


_TIED = {"tie_word_embeddings": True}
# From the published config.json of Qwen2.5 (0.5b to 72b), Llama 3.1 (8b, 70b, 405b) and Qwen3 (30b-a3b, 235b-a22b).
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": _decoder("qwen2", 896, 4864, 24, 14, 2, 151936, **_TIED),
    "1.5b": _decoder("qwen2", 1536, 8960, 28, 12, 2, 151936, **_TIED),
    "3b": _decoder("qwen2", 2048, 11008, 36, 16, 2, 151936, **_TIED),
    "7b": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256),
    "14b": _decoder("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "30b-a3b": _mixture(2048, 6144, 48, 32, 4, 768),
    "32b": _decoder("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "70b": _decoder("llama", 8192, 28672, 80, 64, 8, 128256),
    "72b": _decoder("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "235b-a22b": _mixture(4096, 12288, 94, 64, 4, 1536),
    "405b": _decoder("llama", 16384, 53248, 126, 128, 8, 128256),
}


@contextmanager
def model_path(name: str) -> Iterator[str]:
    """What `model.path` must be for this name: a size, a folder, a config.json, or a model of the hub."""
    if name.lower() in SHAPES:
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SHAPES[name.lower()]))
            yield folder
        return
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        yield str(path.parent)
    elif (path / "config.json").is_file() or name.count("/") == 1:
        yield name
    else:
        known = ", ".join(SHAPES)
        raise UserError(f"--model {name}: unknown. Give a size ({known}), a config.json, its folder, or a hub id")


@dataclass(frozen=True)
class ModelCosts:
    """Numbers of a model that decide what a token costs. `active` weights multiply a token: all matrices with the head,
    of the experts those that are chosen."""

    weights: int  # all of them
    matrices: int
    active: int
    experts: int  # weights of experts, of `matrices`
    picked: int  # experts that a token goes to; 0 of a dense model
    chosen: float  # and their share of all
    adapters: int  # trained weights beside a frozen base; 0 without LoRA
    layers: int
    attending: int  # layers with attention; others have a recurrent state
    state: int  # bytes of the recurrent states of a sequence in all layers
    width: int
    narrow: int  # the narrowest wide matrix: of an expert, or the model's width
    queries: int  # width of all query heads
    keys: int  # and of all keys and values
    cache: tuple[tuple[int, int], ...]  # heads and bytes of each that a token leaves in the cache
    native_cache: tuple[tuple[int, int], ...]  # by ranks, bytes in that of the native engine, which holds latents

    @classmethod
    def of(cls, model: Any) -> ModelCosts:
        """Of a model on the meta device; `planner.count` calls it."""
        inner = without_adapters(model)
        config = inner.config.get_text_config()
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        if missing := [name for name in names if not getattr(config, name, None)]:
            raise UserError(f"--model: {config.model_type} is not planned over GPUs: it has no {', '.join(missing)}")
        table, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
        looked_up = 0 if head is not None and head.weight is table else table.numel()
        own = {name: weight for name, weight in model.named_parameters() if "lora_" not in name}
        matrices = sum(weight.numel() for weight in own.values() if weight.ndim > 1) - looked_up
        experts = sum(weight.numel() for name, weight in own.items() if ".experts." in name)
        adapters = sum(weight.numel() for name, weight in model.named_parameters() if "lora_" in name)
        count = next((size for name in EXPERT_COUNTS if (size := getattr(config, name, None))), 0) if experts else 0
        picked = getattr(config, "num_experts_per_tok", None) or count
        picked = picked if count else 0
        chosen = picked / count if count else 1.0
        narrow = getattr(config, "moe_intermediate_size", None) if count else None
        queries, keys = attention_widths(config)
        return cls(
            weights=sum(weight.numel() for weight in own.values()),
            matrices=matrices,
            active=math.ceil(matrices - experts * (1 - chosen)),
            experts=experts,
            picked=picked,
            chosen=chosen,
            adapters=adapters,
            layers=config.num_hidden_layers,
            attending=attending_layers(inner),
            state=state_bytes(inner),
            width=config.hidden_size,
            narrow=narrow or config.hidden_size,
            queries=queries,
            keys=keys,
            cache=tuple(cached_heads(model)),
            native_cache=tuple((ranks, bytes_per_token(inner, ranks, latents=True)) for ranks in TEAMS),
        )

    def cached(self, ranks: int, engine: str = "native") -> int:
        """Bytes that a token leaves on each of the ranks of an engine."""
        if engine == "native" and ranks in dict(self.native_cache):
            return dict(self.native_cache)[ranks]
        return sum(size * own_key_heads(heads, ranks) for heads, size in self.cache)


def attention_widths(config: Any) -> tuple[int, int]:
    """Of all query heads in the products of attention, and of all keys and values. Heads of latent attention (MLA) have
    keys and values of their own, of different sizes."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_nope_head_dim", None):
        both = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return heads * both // 2, heads * both
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * size, 2 * (getattr(config, "num_key_value_heads", None) or heads) * size
