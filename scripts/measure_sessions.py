"""Tokens per second of conversations over HTTP: the server of a run, its engine alone, and vLLM's server.

    python scripts/measure_sessions.py --tokenizer MODEL_FOLDER [--model 7b] [--device cuda] [--sessions 1024]
        [--turns 16] [--tokens 64] [--spread 0.5] [--observation 32] [--systems engine,run,vllm] [--http 4]
        [--paced 12,25,5[,16]]

`--model` is a preset of `posttrain bench` (random weights, with the vocabulary of `--tokenizer`) or a folder; the
default is the folder of the tokenizer. All sessions are played at once by other processes, `--http` of them, which is
also the number of HTTP processes of the run (`agent.http_processes`). A turn has `--tokens` sampled tokens, more or
less by up to the share `--spread` of them (several, as 0,0.5, are measured in turn): with 0 all turns end at once, and
the engine waits for all requests of the next ones. A message of `--observation` words follows.
`engine` has the same turns without HTTP, rendering
and ledger. vLLM is asked for completions of token ids, its best case: the history is a prefix that it has cached, and
nothing is rendered. Below the run's server stand the CPU seconds of its HTTP processes, and of the threads of the
engine's process: `main` is the engine and the conversations, `programs` the link to the HTTP process. `--profile FILE`
writes where the HTTP process spent its time (cProfile).

`--paced STEP,ROW,HOST` replaces the engine by one that computes nothing, and costs this machine what an engine on a GPU
costs its host: a step waits STEP milliseconds and ROW microseconds for each sequence, without Python's lock, and keeps
the lock for HOST milliseconds. 12,25,5 is 43 ms at 1,024 sequences, as a 7B model on an H200. With a fourth number, as
of `native` on a GPU, a step is a round of so many tokens, and begins before the results of the one before are read. No
GPU is needed. It also
reports the CPU seconds of the engine's process that are not the engine's, the time from a turn's end to the submission
of the next one, the time between two steps, and by how much steps took longer than they were to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needs import need

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
need("aiohttp", get="pip install 'posttrain[serve]'")
KEY = "measured"
PROMPT = "A user wants to know: " + " ".join(str(number) for number in range(40))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--spread", default="0", help="by what share of --tokens turns differ in length; one or several"
    )
    parser.add_argument("--http", type=int, default=1, help="HTTP processes of the run, and processes of clients")
    parser.add_argument("--observation", type=int, default=32)
    parser.add_argument("--systems", default="engine,run")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device's memory")
    parser.add_argument("--paced", metavar="STEP,ROW,HOST[,ROUND]", help="an engine that only takes time (see above)")
    parser.add_argument("--profile", metavar="FILE", help="profile the HTTP process")
    parser.add_argument("--play", help=argparse.SUPPRESS)  # a process of clients: `run URL PART` or `vllm ...`
    parser.add_argument("--ready", help=argparse.SUPPRESS)  # where processes of clients say that they are ready
    options = parser.parse_args()
    options.spreads = [float(one) for one in options.spread.split(",")]
    options.spread = options.spreads[0]
    return options


def next_message(turn: int, options: argparse.Namespace) -> dict[str, str]:
    return {"role": "user", "content": " ".join(str(turn + number) for number in range(options.observation))}


def tokens_of(session: int, turn: int, options: argparse.Namespace) -> int:
    """Tokens of a turn; the same for every system."""
    share = random.Random(session * 1000 + turn).uniform(-options.spread, options.spread)
    return max(1, round(options.tokens * (1 + share)))


# -- the clients ------------------------------------------------------------------------------------------------------
async def play(system: str, url: str, part: int, options: argparse.Namespace) -> None:
    """This process's part of the sessions, all at once; prints when their requests began and ended."""
    import aiohttp

    connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {KEY}"}
    timeout, share = aiohttp.ClientTimeout(None), range(part, options.sessions, options.http)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as http:

        async def post(where: str, body: object) -> dict[str, Any]:
            async with http.post(where, json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        async def converse(found: dict[str, Any]) -> int:
            messages, tokens = list(found["task"]["messages"]), 0
            for turn in range(options.turns):
                body = {"messages": messages, "max_tokens": tokens_of(found["task"]["index"], turn, options)}
                answer = await post(f"{found['base_url']}/chat/completions", body)
                tokens += answer["usage"]["completion_tokens"]
                messages += [answer["choices"][0]["message"], next_message(turn, options)]
            await post(f"{found['base_url'].removesuffix('/v1')}/reward", {"reward": 1.0})
            return tokens

        async def complete(number: int) -> int:
            ids, following, tokens = prompts[number], prompts[-1], 0
            for turn in range(options.turns):
                most = tokens_of(number, turn, options)
                body = {"prompt": ids, "max_tokens": most, "ignore_eos": True, "return_token_ids": True}
                answer = await post(f"{url}/v1/completions", {"model": "measured", "logprobs": 0, **body})
                sampled = answer["choices"][0]["token_ids"]
                tokens += len(sampled)
                ids = [*ids, *sampled, *following]
            return tokens

        if system == "run":
            opened = []
            while len(opened) < len(share):
                found = await post(f"{url}/s/next", {})
                if found["id"] is None:
                    await asyncio.sleep(0.02)
                else:
                    opened.append(found)
            playing = [converse(found) for found in opened]
        else:
            first, following = turn_ids(options)
            prompts = [[*first[:-1], first[-1] + number % 7] for number in range(options.sessions)] + [following]
            playing = [complete(number) for number in share]
        # Perhaps others are not ready yet: all begin at once.
        ready = Path(options.ready)
        (ready / str(part)).touch()
        while len(list(ready.iterdir())) < options.http:
            await asyncio.sleep(0.01)
        started = time.time()
        tokens = sum(await asyncio.gather(*playing))
        print(json.dumps({"started": started, "ended": time.time(), "tokens": tokens}))


def turn_ids(options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and of what stands between two turns."""
    from posttrain.conversations.templates import MessageTemplate

    template = MessageTemplate(tokenizer_of(options))
    first = template.prompt([{"role": "user", "content": PROMPT}])
    return first, template.ids([next_message(0, options)], first[0])


def tokenizer_of(options: argparse.Namespace) -> Any:
    from posttrain.config.model import ModelConfig
    from posttrain.models.loading import load_tokenizer

    return load_tokenizer(ModelConfig(path=options.tokenizer))


class Clients:
    """Processes that play all sessions."""

    def __init__(self, system: str, url: str, options: argparse.Namespace) -> None:
        self._ready = tempfile.TemporaryDirectory()
        command = [sys.executable, *sys.argv, "--spread", str(options.spread), "--ready", self._ready.name, "--play"]
        self._started = [
            subprocess.Popen([*command, f"{system} {url} {part}"], stdout=subprocess.PIPE, text=True)
            for part in range(options.http)
        ]

    def wait(self) -> tuple[float, int]:
        """(seconds from the first request to the last answer, sampled tokens)."""
        found = [json.loads(process.communicate()[0]) for process in self._started]
        self._ready.cleanup()
        seconds = max(one["ended"] for one in found) - min(one["started"] for one in found)
        return seconds, sum(one["tokens"] for one in found)


# -- the systems ------------------------------------------------------------------------------------------------------
def write_model(options: argparse.Namespace, folder: Path) -> tuple[Path, bool]:
    """(a folder with configuration and tokenizer, whether its weights are to be drawn)."""
    from posttrain.bench.workload import PRESETS, find_shape

    if options.model not in PRESETS:
        return Path(options.model or options.tokenizer), False
    for file in Path(options.tokenizer).iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens", "vocab", "merges")):
            shutil.copy(file, folder)
    config = json.loads((find_shape(options.model).folder / "config.json").read_text())
    size = -(-len(tokenizer_of(options)) // 64) * 64
    (folder / "config.json").write_text(
        json.dumps(config | {"vocab_size": size, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None})
    )
    return folder, True


def make_engine(options: argparse.Namespace, folder: Path, drawn: bool) -> Any:
    import torch

    from posttrain.bench.workload import draw
    from posttrain.config.model import ModelConfig
    from posttrain.config.rollout import RolloutConfig
    from posttrain.models.loading import fuse_and_prove, load_causal_lm, load_tokenizer
    from posttrain.rollout.engines import build_engine

    device, model = torch.device(options.device), ModelConfig(path=str(folder))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if drawn:
        module = fuse_and_prove(draw(folder, dtype, device).eval(), f"--model {options.model}")
    else:
        module = load_causal_lm(model, dtype=dtype, device=device)
    memory = {"gpu_memory_utilization": options.memory} if device.type == "cuda" else {"kv_cache_gb": 4.0}
    engine, said = build_engine(RolloutConfig(max_num_seqs=1024, **memory), module, load_tokenizer(model))
    engine.wake()
    return engine, said


def make_paced(options: argparse.Namespace) -> Any:
    """An engine whose steps take time and compute nothing."""
    import numpy as np

    from posttrain.rollout.base import Output, RolloutEngine

    step_ms, row_us, host_ms, *rounds = (float(one) for one in options.paced.split(","))
    word = turn_ids(options)[0][-1]

    class Paced(RolloutEngine):
        pieces = 4  # a step gives up Python's lock several times: at launches, copies and waits

        def __init__(self) -> None:
            self.running: dict[Any, tuple[int, int]] = {}  # tokens made, tokens wanted
            self.begun: tuple[float, float, dict[Any, int]] | None = None  # a round: begin, end, tokens by request
            self.reset()

        def reset(self) -> None:
            self.cpu_s, self.steps, self.last = 0.0, 0, 0.0
            self.ended: dict[Any, float] = {}
            self.delays, self.gaps, self.late = list[float](), list[float](), list[float]()

        def report(self) -> None:
            seen = {"from a turn's end to the next": self.delays, "between steps": self.gaps, "steps late": self.late}
            for name, values in seen.items():
                ms = np.array(values) * 1e3
                middle, high = np.percentile(ms, [50, 95])
                print(f"  ms {name}: mean {ms.mean():.2f}, median {middle:.2f}, 95% {high:.2f}")

        def submit(self, request: Any) -> None:
            self.running[request.id] = 0, request.sampling.max_tokens
            if (ended := self.ended.pop(request.parent, None)) is not None:
                self.delays.append(time.perf_counter() - ended)

        def step(self) -> list[Output]:
            began, cpu = time.perf_counter(), time.thread_time()
            if self.last:
                self.gaps.append(began - self.last)
            waits = (step_ms + row_us * len(self.running) / 1000) / 1000
            made = dict.fromkeys(self.running, 1)
            if rounds:
                waits, made = self.next_round(waits)
            for _ in range(self.pieces):
                time.sleep(waits / self.pieces)
                end = time.thread_time() + host_ms / 1000 / self.pieces
                while time.thread_time() < end:
                    pass
            ended = []
            for id, new in made.items():
                before, wanted = self.running[id]
                self.running[id] = before + new, wanted
                if before + new == wanted:
                    del self.running[id]
                    ended.append(Output(id, [word] * wanted, np.full(wanted, -1.0), "length", [(0, wanted)]))
            self.last, self.steps = time.perf_counter(), self.steps + 1
            self.ended |= dict.fromkeys((output.id for output in ended), self.last)
            self.late.append(self.last - began - waits - host_ms / 1000)
            self.cpu_s += time.thread_time() - cpu
            return ended

        def next_round(self, step_s: float) -> tuple[float, dict[Any, int]]:
            """Begins a round; gives the seconds until the one before has ended, and its tokens."""
            before, now = self.begun, time.perf_counter()
            coming = {} if before is None else before[2]
            left = {id: wanted - made - coming.get(id, 0) for id, (made, wanted) in self.running.items()}
            tokens = {id: min(most, int(rounds[0])) for id, most in left.items() if most}
            begin, self.begun = max(now, 0.0 if before is None else before[1]), None
            if tokens:  # rows that ended in the round before keep their places in this one
                self.begun = begin, begin + max(tokens.values()) * step_s, tokens
            return max(0.0, begin - now - host_ms / 1000), coming

        def ahead_s(self) -> float:
            if self.begun is None:
                return 0.0
            begin, end, _ = self.begun
            return begin + 0.8 * (end - begin) - 0.05 - time.perf_counter()

        def has_work(self) -> bool:
            return bool(self.running)

        def abort(self, ids: Any) -> list[Output]:
            return []

        def release(self, ids: Any) -> None: ...
        def score(self, token_ids: Any, *, temperature: float = 1.0) -> Any: ...
        def load_weights(self, weights: Any, version: int) -> None: ...
        def cache_bytes(self) -> int: ...
        def _give_back(self) -> None: ...
        def _take(self, stage: Any) -> None: ...

    return Paced(), f"paced, {options.paced}"


def run_alone(options: argparse.Namespace, engine: Any) -> tuple[float, int]:
    """The same turns, submitted as soon as the turn before has ended."""
    from posttrain.rollout.base import Request, Sampling
    from posttrain.rollout.generate import admission_deadline, advance

    first, following = turn_ids(options)
    tokens = 0

    def sampling(number: int, turn: int) -> Sampling:
        return Sampling(max_tokens=tokens_of(number, turn, options))

    ids = [list(first) for _ in range(options.sessions)]
    started = time.perf_counter()
    for number, row in enumerate(ids):
        engine.submit(Request((number, 0), list(row), sampling(number, 0), number, keep=True))
    while engine.has_work():
        for output in advance(engine, admission_deadline(engine)):
            number, turn = output.id
            tokens += len(output.token_ids)
            if turn + 1 == options.turns:
                engine.release([(number, place) for place in range(options.turns)])
                continue
            ids[number] += [*output.token_ids, *following]
            how, parent = sampling(number, turn + 1), (number, turn)
            engine.submit(Request((number, turn + 1), list(ids[number]), how, number, parent, keep=True))
    return time.perf_counter() - started, tokens


def run_server(options: argparse.Namespace, engine: Any, folder: Path) -> tuple[float, int]:
    os.environ["POSTTRAIN_API_KEY"] = KEY
    import torch

    from posttrain.commands.generation.loop import Requests
    from posttrain.config.root import PPOConfig
    from posttrain.conversations.opening import open_conversations
    from posttrain.models.loading import load_tokenizer
    from posttrain.rollout.base import Sampling

    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.rollout.agent = {
        "program": "outside", "timeout_s": 1200.0, "http_processes": options.http,
    }  # fmt: skip
    first, following = turn_ids(options)
    config.data.max_prompt_length = len(first) + 8
    longest = round(options.tokens * (1 + options.spread)) + 1
    config.data.max_response_length = (longest + len(following) + 8) * options.turns
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    # Turns are admitted as they come, as in a run on a GPU.
    if options.profile:
        profile_server(options.profile)
    with open_conversations(config, tokenizer, torch.device("cuda"), lambda line: None) as loop:
        assert loop is not None
        requests = Requests(engine, Sampling(max_tokens=longest), loop)
        programs = loop.agents.context["programs"]
        http = [front.process._worker.pid for front in programs._fronts]
        clients = Clients("run", programs.url, options)
        prompt = [{"role": "user", "content": PROMPT}]
        for number in range(options.sessions):
            row = {"raw_prompt": prompt, "data_source": "", "ground_truth": "", "extra_info": {}, "index": number}
            requests.submit((number, 0), list(first), number, row)
        before = thread_seconds(http)
        if options.paced:
            engine.reset()
        while requests.has_work():
            requests.advance()
        spent = {name: value - before.get(name, 0.0) for name, value in thread_seconds(http).items()}
        failed = sum(record.error is not None for record in loop.records.values())
        found = clients.wait()
        print(f"  {failed} sessions failed, {sum(len(record.rows) for record in loop.records.values())} rows")
        shares = ", ".join(f"{name} {value:.1f}" for name, value in spent.items() if value > 0.05)
        print(f"  CPU seconds: {shares}")
        if options.paced:
            beside = sum(value for name, value in spent.items() if name != "HTTP processes") - engine.cpu_s
            a_turn = 1e3 * beside / options.sessions / options.turns
            print(f"  CPU of the engine's process beside the engine: {a_turn:.3f} ms a turn")
            engine.report()
    return found


def profile_server(file: str) -> None:
    """Has the HTTP process, which is forked from this one, write a profile of itself when it ends."""
    import cProfile

    from posttrain.conversations.serving import process

    plain = process._run

    def run(*given: Any) -> None:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(plain, *given)
        profile.dump_stats(file)

    process._run = run


def thread_seconds(http: list[int]) -> dict[str, float]:
    """Processor seconds so far of this process's threads, by name, and of the HTTP processes."""
    found = {"HTTP processes": sum(_seconds(f"/proc/{pid}/stat") for pid in http)}
    for thread in threading.enumerate():
        name = "main" if thread is threading.main_thread() else thread.name
        found[name] = found.get(name, 0.0) + _seconds(f"/proc/self/task/{thread.native_id}/stat")
    return found


def _seconds(path: str) -> float:
    with open(path) as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_vllm(options: argparse.Namespace, folder: Path, drawn: bool, row: Callable[[str, float, int], None]) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    longest = 8192
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += [
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "measured",
        "--max-num-seqs",
        "1024",
        "--dtype",
        "bfloat16",
    ]
    command += [
        "--max-model-len",
        str(longest),
        "--enable-prefix-caching",
        "--disable-log-stats",
        "--generation-config",
    ]
    command += ["vllm", "--gpu-memory-utilization", str(options.memory), *(["--load-format", "dummy"] if drawn else [])]
    log = Path(tempfile.gettempdir()) / "measured_vllm.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url, started = f"http://127.0.0.1:{port}", time.monotonic()
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() - started > 300:
                    sys.exit(f"vLLM's server does not start:\n{log.read_text()[-3000:]}")
                time.sleep(1)
        for spread in options.spreads:
            options.spread = spread
            row(f"vLLM's server, spread {spread}", *Clients("vllm", url, options).wait())
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    options = arguments()
    if options.play:
        system, url, part = options.play.split(" ")
        asyncio.run(play(system, url, int(part), options))
        return
    systems, per_turn = options.systems.split(","), options.sessions * options.turns
    print(
        f"{options.sessions} sessions of {options.turns} turns x {options.tokens} tokens, {options.model or 'model'}",
        flush=True,
    )
    print("| system | seconds | sampled tokens/s | requests/s |\n|---|---:|---:|---:|")

    def row(name: str, seconds: float, tokens: int) -> None:
        print(f"| {name} | {seconds:.1f} | {tokens / seconds:,.0f} | {per_turn / seconds:,.0f} |", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder, drawn = write_model(options, Path(temporary))
        if {"engine", "run"} & set(systems):
            engine, said = make_paced(options) if options.paced else make_engine(options, folder, drawn)
            if not options.paced:
                row("(warm-up) engine alone", *run_alone(options, engine))
            for spread in options.spreads:
                options.spread = spread
                print(f"spread {spread}")
                if "engine" in systems:
                    row(f"engine alone: {said}", *run_alone(options, engine))
                if "run" in systems:
                    row("the server of a run", *run_server(options, engine, folder))
            del engine
            if options.device == "cuda":
                import gc

                import torch

                gc.collect()
                torch.cuda.empty_cache()
        if "vllm" in systems:
            run_vllm(options, folder, drawn, row)


if __name__ == "__main__":
    main()
