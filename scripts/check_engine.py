"""Tries the engine `vllm` or `sglang` where it is installed, on a GPU or a CPU: a table, and exit status 1 if a line
failed.

    python scripts/check_engine.py vllm|sglang [--model FOLDER] [--rows 64] [--tokens 64]

Log-probs, scores and syncs are compared with transformers' own forward pass over the same rows; memory is what the
device says is free. Without --model the embedded one serves on a CPU, and on a GPU an untrained one of 0.1B parameters.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.models.embedded import write_model
from posttrain.models.forward import row_log_probs
from posttrain.models.loading import load_causal_lm, load_tokenizer, resolve_dtype
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.trainer.embedded import ensure_embedded

SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4}
INITIAL = 0.02  # the width of untrained weights
Check = Callable[[], str]


class Desk:
    """The engine under trial and the model that it is compared with."""

    def __init__(self, name: str, folder: str, rows: int, tokens: int) -> None:
        self.name = name
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = resolve_dtype("auto", self.device)
        self.allowed = 1e-4 if dtype == torch.float32 else 0.25
        self.rows, self.tokens, self.folder = rows, tokens, folder
        model = ModelConfig(path=folder)
        self.module = load_causal_lm(model, dtype=dtype, device=self.device)
        self.tokenizer = load_tokenizer(model)
        generator = torch.Generator().manual_seed(0)
        size = min(len(self.tokenizer), self.module.config.vocab_size)
        self.prompts = [
            torch.randint(0, size, (5 + row % 30,), generator=generator).tolist() for row in range(rows // 4)
        ] * 4

    def start(self) -> str:
        before, began = self.free(), time.perf_counter()
        share = 0.3 if self.device.type == "cuda" else None
        config = RolloutConfig(name=self.name, gpu_memory_utilization=share, max_num_seqs=self.rows)
        made, said = build_engine(config, self.module, self.tokenizer, device=self.device, longest=64 + self.tokens)
        assert said.startswith(self.name), said
        self.engine = made
        taken = f", takes {(before - self.free()) / 2**30:.2f} GiB" if self.device.type == "cuda" else ""
        return f"{said}: {time.perf_counter() - began:.1f} s{taken}"

    def free(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0

    def log_probs(self, **settings: Any) -> str:
        sampling = Sampling(max_tokens=8, **settings)
        prompts = self.prompts[:12]
        outputs = generate(self.engine, prompts, [sampling] * len(prompts), range(len(prompts)))
        rows = [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
        temperature = 1.0 if sampling.greedy else sampling.temperature
        own = [scored[-8:].detach().cpu() for scored in row_log_probs(self.module, rows, temperature)]
        worst = max(
            float((mine - torch.tensor(output.log_probs)).abs().max())
            for mine, output in zip(own, outputs, strict=True)
        )
        assert worst < self.allowed, f"differ by {worst:.2g}"
        drawn = "" if outputs[0].sampling_log_probs is None else ", and those of what was drawn from are given"
        return f"largest difference {worst:.2g}{drawn}"

    def seeds(self) -> str:
        sampling, prompts = Sampling(max_tokens=8), self.prompts[:8]
        one = generate(self.engine, prompts, [sampling] * 8, range(8))
        other = generate(self.engine, prompts[::-1], [sampling] * 8, [*range(8)][::-1])[::-1]
        same = sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
        again = generate(self.engine, prompts, [sampling] * 8, range(8))
        assert [a.token_ids for a in one] == [b.token_ids for b in again], "the same call gave something else"
        return f"{same} of 8 the same in another order; all of them when asked again"

    def stops(self) -> str:
        free = generate(self.engine, self.prompts[:1], [Sampling(max_tokens=12)], [1])[0].token_ids
        stopped = generate(self.engine, self.prompts[:1], [Sampling(max_tokens=12, stop_token_ids=(free[4],))], [1])[0]
        assert stopped.token_ids == free[: free.index(free[4]) + 1] and stopped.finish_reason == "stop"
        self.engine.submit(Request("gone", self.prompts[0], Sampling(max_tokens=12), 1))
        for _ in range(3):
            self.engine.step()
        gone = self.engine.abort(["gone"])[0]
        assert gone.token_ids == free[: len(gone.token_ids)] and not self.engine.has_work()
        return f"stop token kept; an aborted response has {len(gone.token_ids)} tokens after 3 steps"

    def sync(self) -> str:
        old = self.engine.score(self.prompts[:4])[0]
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.mul_(1.05)
        began = time.perf_counter()
        self.engine.sleep()
        self.engine.wake("weights")
        self.engine.load_weights(self.module.state_dict().items(), 3)
        took = time.perf_counter() - began
        worst = self.score_difference()
        moved = float((self.engine.score(self.prompts[:4])[0] - old).abs().max())
        assert self.engine.cache_bytes() == 0, "scores left a cache behind"
        self.engine.wake("cache")
        output = generate(self.engine, self.prompts[:1], [Sampling(max_tokens=3)], [0])[0]
        assert output.versions == [(3, 3)] and moved > worst
        size = sum(weight.nbytes for weight in self.module.parameters()) / 2**20
        apart = f"scores differ by {worst:.2g}, had moved by {moved:.2g}"
        return f"{took:.2f} s for {size:.0f} MiB with sleep and wake; {apart}"

    def score_difference(self, temperature: float = 1.0) -> float:
        rows = self.prompts[:4]
        theirs = self.engine.score(rows, temperature=temperature)
        own = [scored.detach().cpu() for scored in row_log_probs(self.module, rows, temperature)]
        worst = max(float((a - b).abs().max()) for a, b in zip(own, theirs, strict=True))
        assert worst < self.allowed, f"differ by {worst:.2g}"
        return worst

    def sleep(self) -> str:
        held, awake, began = self.engine.cache_bytes(), self.free(), time.perf_counter()
        assert held > 0
        self.engine.sleep()
        slept, asleep = time.perf_counter() - began, self.free()
        assert self.engine.cache_bytes() == 0
        began = time.perf_counter()
        self.engine.wake()  # without a sync: the weights are the old ones again
        woke = time.perf_counter() - began
        self.log_probs()
        given = f"; gives {(asleep - awake) / 2**30:.2f} GiB back" if self.device.type == "cuda" else ""
        return f"cache of {held / 2**30:.2f} GiB{given}; sleeps in {slept:.2f} s, wakes in {woke:.2f} s"

    def speed(self, engine: Any = None) -> str:
        engine = engine or self.engine
        sampling = [Sampling(max_tokens=self.tokens)] * len(self.prompts)
        generate(engine, self.prompts, sampling, range(len(self.prompts)))
        began = time.perf_counter()
        outputs = generate(engine, self.prompts, sampling, range(len(self.prompts)))
        took = time.perf_counter() - began
        made = sum(len(output.token_ids) for output in outputs)
        return f"{made / took:,.0f} tokens/s ({len(self.prompts)} rows x {self.tokens})"

    def native_speed(self) -> str:
        self.engine.sleep()
        engine, said = build_engine(RolloutConfig(name="native"), self.module, self.tokenizer, device=self.device)
        return f"{self.speed(engine)}, {said}"

    def training(self) -> str:
        """In a process of its own, while the engine here sleeps."""
        with tempfile.TemporaryDirectory() as place:
            run = [sys.executable, "-m", "posttrain.trainer.main_ppo", "algorithm.adv_estimator=grpo"]
            settings = [f"actor_rollout_ref.rollout.name={self.name}", "actor_rollout_ref.rollout.n=4"]
            settings += ["actor_rollout_ref.rollout.max_num_seqs=64"]
            if self.device.type == "cuda":  # this process holds some of it
                settings += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.3"]
            settings += ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
            settings += ["trainer.total_training_steps=3", f"trainer.default_local_dir={place}"]
            path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                [*run, *settings],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            said = (done.stdout + done.stderr).splitlines()
            assert done.returncode == 0, "\n".join(said[-15:])
            return "; ".join(line for line in said if line.startswith(("Step 0: rollout", "step 3/3")))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--model", help="a folder in Hugging Face format")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.model:
            folder = options.model
        elif torch.cuda.is_available():
            folder = str(write_model(Path(place) / "model", num_hidden_layers=12, initializer_range=INITIAL, **SIZES))
        else:
            folder = str(ensure_embedded(print) / "model")
        return _table(Desk(options.engine, folder, options.rows, options.tokens))


def _table(desk: Desk) -> int:
    checks: dict[str, Check] = {
        "start": desk.start,
        "log-probs": desk.log_probs,
        "log-probs at temperature 0.6": lambda: desk.log_probs(temperature=0.6),
        "log-probs of greedy rows": lambda: desk.log_probs(greedy=True),
        "top-p 0.8 at temperature 0.6": lambda: desk.log_probs(temperature=0.6, top_p=0.8),
        "top-k 5, penalty 1.3": lambda: desk.log_probs(top_k=5, repetition_penalty=1.3),
        "scores": lambda: f"largest difference {desk.score_difference():.2g}",
        "scores at temperature 0.7": lambda: f"largest difference {desk.score_difference(0.7):.2g}",
        "seeds": desk.seeds,
        "stops and aborts": desk.stops,
        "sleep and wake": desk.sleep,
        "sync": desk.sync,
        "speed": desk.speed,
        "speed of native": desk.native_speed,
        "three steps of GRPO": desk.training,
    }
    failed = 0
    for name, check in checks.items():
        try:
            said = check()
        except Exception as error:
            traceback.print_exc()
            said, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
            if name == "start":
                print(f"{name:30} {said}")
                return 1
        print(f"{name:30} {said}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} hold on {desk.device}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
