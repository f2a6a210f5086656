"""`posttrain generate MODEL (--prompt TEXT | --data FILE --out FILE)`.

With `--workers` one file is answered by several processes of this machine, each with a device (or a share of the cores)
of its own. A sample's seed is made of the run's seed, its prompt's row and its number, and does not depend on the
worker: the file is the same for every number of workers. Worker `k` of `n` answers the rows k, k + n, k + 2n, ... into
parts of its own; when all have ended, the result is made of them. Killed and started again, each continues where it
was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import cores
from posttrain.commands.generation.settings import (
    USED,
    USED_BY_REWARDS,
    Settings,
    add_arguments,
    check_model,
    find_run_of,
    is_checkpoint,
    read_settings,
    split_words,
)
from posttrain.errors import UserError
from posttrain.spelling import OptionParser
from posttrain.texts import own_turns
from posttrain.tracking.progress import waiting
from posttrain.trainer.constants_ppo import apply_environment

if TYPE_CHECKING:
    from posttrain.commands.generation.loop import Answers
    from posttrain.data.rows import RowTable

USAGE = "posttrain generate MODEL (--prompt TEXT | --data FILE --out FILE) [options] [key=value ...]"
POLL_S = 0.1


@dataclass(frozen=True)
class Share:
    """The rows of worker `worker` of `workers`."""

    worker: int
    workers: int

    @classmethod
    def read(cls, text: str) -> Share:
        """`0/4`, the argument of the first of four."""
        worker, _, workers = text.partition("/")
        return cls(int(worker), int(workers))

    def has(self, row: int) -> bool:
        return row % self.workers == self.worker

    def target(self, out: Path) -> Path:
        """Where its parts lie: beside the result, under the worker's own name."""
        return out.with_name(f"{out.name}.worker_{self.worker}_of_{self.workers}")


def main(args: Sequence[str]) -> int:
    """Answer the prompts; 0 when all are answered."""
    parser = OptionParser(
        prog="posttrain generate",
        usage=USAGE,
        description="Responses of a model to prompts. Killed and started again, it continues where it was.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL",
        help="folder, hub id, `embedded`, or a run's checkpoint (.../global_step_N: its run's settings serve)",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt to answer; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write: .parquet or .jsonl")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that share the rows, each on a GPU of its own"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of a worker: K/N
    add_arguments(parser)
    options = parser.parse_intermixed_args(list(args))
    model, overrides = split_words(options.words, "generate")
    if model is None:
        parser.error("MODEL is missing: a folder, a hub id, `embedded` or a checkpoint")
    if bool(options.prompt) == bool(options.data):
        parser.error("give prompts with --prompt, or a file with --data (one of the two)")
    if options.data and options.out is None:
        parser.error("--data needs --out: the file to write (.parquet or .jsonl)")
    if options.workers < 1 or (options.workers > 1 and options.out is None):
        parser.error("--workers is 1 or more, and several need --data and --out")
    apply_environment()
    check_model(model)
    # Before torch is imported, which takes seconds: a wrong option is answered at once.
    settings = read_settings(options, overrides, settings_folder(model))
    table = read_rows(options, settings)
    if options.out is None:
        return _print_answers(model, table, settings)
    if options.workers > 1:
        return _generate_by_workers(args, table, settings, options)
    share = Share.read(options.share) if options.share else None
    return generate_file(model, table, settings, options.out, overwrite=options.overwrite, share=share)


def settings_folder(model: str) -> Path | None:
    """The run whose settings a checkpoint brings with it."""
    return find_run_of(Path(os.path.expandvars(os.path.expanduser(model)))) if is_checkpoint(model) else None


def read_rows(options: argparse.Namespace, settings: Settings) -> RowTable:
    """The rows of --data, or of --prompt."""
    from posttrain.data.rows import load_rows, table_of_rows

    if options.data:
        files = [_embedded_file() if name == "embedded" else name for name in options.data]
        return load_rows(files, limit=settings.config.data.val_max_samples, setting="--data")
    key = settings.config.data.prompt_key
    return table_of_rows([{key: text} for text in options.prompt], name="--prompt")


def _embedded_file() -> Path:
    from posttrain.trainer.embedded import ensure_embedded

    return ensure_embedded(print, model=False) / "test.json"


def _generate_by_workers(args: Sequence[str], table: RowTable, settings: Settings, options: argparse.Namespace) -> int:
    """The same file by several processes, each with its share of the rows."""
    from posttrain.commands.generation.files import SUFFIXES, check_rows, finished_table, remove_parts, write_results
    from posttrain.commands.generation.session import check_target
    from posttrain.workers.roles import pick_device

    out = options.out
    check_target(out, SUFFIXES, overwrite=options.overwrite)
    check_rows(table, out, tools=settings.turns.enable)
    on_gpu = pick_device(settings.config.trainer.device).type == "cuda"
    # The checks above run once, here: workers would find the same mistake N times.
    shares = [Share(worker, options.workers) for worker in range(options.workers)]
    _run_workers(args, shares, on_gpu=on_gpu)
    targets = [share.target(out) for share in shares]
    count = write_results(out, table, finished_table(targets))
    remove_parts(targets)
    print(f"{out}: {count} prompts with {settings.n} {'response' if settings.n == 1 else 'responses'} each")
    return 0


def _run_workers(args: Sequence[str], shares: Sequence[Share], *, on_gpu: bool) -> None:
    """Start `posttrain generate ARGS` once per share and wait; UserError if one fails, after the others were ended."""
    workers = len(shares)
    places = _worker_environments(workers, on_gpu=on_gpu)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "posttrain", "generate", *args, "--workers=1", f"--share={share.worker}/{workers}"],
            # By the environment: CUDA and OpenMP read it once, when they are loaded.
            env={**os.environ, **place},
        )
        for share, place in zip(shares, places, strict=True)
    ]
    failed: list[int] = []
    try:
        while not failed and any(process.poll() is None for process in running):
            time.sleep(POLL_S)
            # before the others are ended, which gives them a status that is not theirs
            failed = [number for number, process in enumerate(running) if process.poll() not in (None, 0)]
    finally:
        # All are ended before any is waited for: the slowest end costs its time once, not in turn.
        for process in running:
            if process.poll() is None:
                process.terminate()  # it keeps what it has finished
        for process in running:
            process.wait()
    if failed:
        raise UserError(
            f"worker {failed[0]} of {workers} ended with status {running[failed[0]].returncode}; what it said stands "
            "above. The same command continues with what is finished."
        )


def _worker_environments(workers: int, *, on_gpu: bool) -> list[dict[str, str]]:
    """The environment of each worker: one GPU, or its share of the cores."""
    if not on_gpu:
        return [{"OMP_NUM_THREADS": str(max(1, cores.usable() // workers))}] * workers
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    if workers > len(devices):
        raise UserError(f"--workers {workers}: this machine has {len(devices)} GPUs; give at most as many workers.")
    return [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:workers]]


def generate_file(
    model: str, table: RowTable, settings: Settings, out: Path, *, overwrite: bool, share: Share | None = None
) -> int:
    """Answer the rows into a file; finished prompts lie in OUT.parts until all are. With a `share` only its rows are
    answered, and the parts stay for the process that joins them."""
    with waiting():
        from posttrain.commands.generation.files import SUFFIXES, Parts, check_rows, write_results
        from posttrain.commands.generation.session import Session, check_target

    check_target(out, SUFFIXES, overwrite=overwrite)
    check_rows(table, out, tools=settings.turns.enable)
    with (
        Session(model, table, settings) as session,
        Parts(share.target(out) if share else out, session.described(), overwrite=overwrite) as parts,
    ):
        session.run(parts, lambda item, answers: None, share.has if share else None)
        if share is not None:
            return 0
        count = write_results(out, table, parts.table())
    parts.remove()
    print(f"{out}: {count} prompts with {settings.n} {'response' if settings.n == 1 else 'responses'} each")
    return 0


_ENDS = {
    "length": " [cut off by --max-tokens]",
    **dict.fromkeys(("turns", "rows"), " [no further turn is allowed]"),
    **dict.fromkeys(("tool_time", "tool_cost"), " [its tools have used up their limit]"),
}


def _format_response(answers: Answers, number: int, tokenizer: Any) -> str:
    """A response as it is printed: turn by turn where tools were called, each answer marked as what it is."""
    if answers.marks is None or answers.tool_calls is None:
        return answers.responses[number]
    if answers.agent_scores is not None:
        return _format_agent_turns(answers, number, tokenizer)
    (turns,) = own_turns([answers.response_ids[number]], [answers.marks[number]], tokenizer)
    calls, lines = json.loads(answers.tool_calls[number]), list[str]()
    for turn, text in enumerate(turns, start=1):
        lines.append(text)
        lines += [f"  {call['name'] or '(no call)'} -> {call['answer']}" for call in calls if call["turn"] == turn]
    return "\n".join(lines)


def _format_agent_turns(answers: Answers, number: int, tokenizer: Any) -> str:
    """A conversation that an agent led: its messages are marked, and its reward or error follows."""
    marked, lines = zip(answers.response_ids[number], (answers.marks or [])[number], strict=True), list[str]()
    for own, stretch in groupby(marked, lambda one: one[1]):
        text = tokenizer.decode([token for token, _ in stretch], skip_special_tokens=True)
        if own or text.strip():  # a response without a word of the model's is one token that says nothing
            lines.append(text if own else f"  -> {text}")
    given = json.loads((answers.agent_scores or [])[number] or "null")
    if given:
        lines.append(f"  [{given['error'] or 'reward ' + format(given['score'], 'g')}]")
    return "\n".join(lines)


def _print_answers(model: str, table: RowTable, settings: Settings) -> int:
    with waiting():
        from posttrain.commands.generation.session import Session

    found: dict[int, Any] = {}
    with Session(model, table, settings) as session:
        session.run(None, lambda item, answers: found.update({answers.index: answers}))
    for item in session.prompts:
        answers = found[item["index"]]
        if len(table) > 1:
            print(f"> {textwrap.shorten(str(item['raw_prompt'][-1]['content']), 100)}")
        for number, reason in enumerate(answers.finish_reasons):
            if settings.n > 1:
                print(f"--- {number + 1} of {settings.n}")
            print(_format_response(answers, number, session.tokenizer) + _ENDS.get(reason, ""))
    if session.dropped:
        raise UserError(f"{session.dropped} prompts are longer than the model allows and were not answered.")
    return 0


def sample_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`options.k` responses of `options.model` to every row; each has its row's columns, `response` and `group`.

    Rows whose prompts are too long for the model have none.
    """
    apply_environment()
    from posttrain.commands.generation.session import Session
    from posttrain.data.rows import table_of_rows

    options.n = options.k
    flags = argparse.Namespace(**{name: getattr(options, name) for name in ("n", "temperature", "max_tokens")})
    used = (*USED, *USED_BY_REWARDS)
    settings = read_settings(flags, options.settings, settings_folder(options.model), used=used)
    found: dict[int, Answers] = {}
    with Session(options.model, table_of_rows(rows, name=options.data), settings) as session:
        session.run(None, lambda item, answers: found.update({answers.index: answers}))
    return [
        {**rows[index], "response": text, "group": index, **_own(answers, number)}
        for index, answers in sorted(found.items())
        for number, text in enumerate(answers.responses)
    ]


def _own(answers: Answers, number: int) -> dict[str, str]:
    """With tools: what the model wrote itself, which built-in scorers read."""
    return {} if answers.own_words is None else {"own_words": answers.own_words[number]}
