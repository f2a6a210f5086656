"""`posttrain view [RUN...]`: serve the page until Ctrl-C, or write it into one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from posttrain.tracking.rundir import ROOT


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posttrain view",
        description="Runs in a browser: curves, samples token by token, health; live while a run goes on.",
        epilog="From another machine: ssh -L 6180:127.0.0.1:6180 HOST, then open the address that was printed.",
    )
    parser.add_argument("run", nargs="*", help=f"runs' folders or names, or folders that hold runs (default: {ROOT}/)")
    parser.add_argument("--port", type=int, help="of 127.0.0.1 (default: 6180, or the next that is free)")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write one HTML file that needs no server")
    options = parser.parse_args(args)
    from posttrain.view.answers import Answers
    from posttrain.view.runs import Runs

    answers = Answers(Runs(options.run))
    if options.export:
        from posttrain.view.server import export

        print(f"written: {export(answers, options.export)}")
        return 0
    from posttrain.view.server import Viewer

    with Viewer(answers, options.port) as viewer:
        count = len(answers.runs.folders())
        print(f"{count} {'run' if count == 1 else 'runs'}: {viewer.address}\nCtrl-C ends it.", flush=True)
        try:
            viewer.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
