"""Shared by all tests: few threads, a quiet transformers, and a tiny untrained model folder."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import patience
import pytest
from forked import Forked

os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
patience.bound_waits_for_programs()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it puts in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _look_at_the_file(descriptor: int) -> None:
    os.fstat(descriptor)


# No test cuts the power, and a killed process loses nothing of what it wrote. Each small run would wait for the disk 17
# times, some milliseconds each.
os.fsync = _look_at_the_file

SHARED = pytest.StashKey[Forked]()
FORKED = "PYTHON_FORKED_FOR_TESTS"
"""Holds the path of the `python` that the processes of a divided suite share."""
HERE = Path(__file__).parent
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.02,
}


def pytest_configure(config: pytest.Config) -> None:
    """Processes among which the suite is divided share one that is forked. In each of them nothing of what is imported
    and collected becomes garbage: the collector looks at it neither now nor later."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.stash[SHARED] = server = Forked()
        os.environ[FORKED] = server.python
    else:
        gc.disable()
    if hasattr(config, "workerinput"):
        place, count = config.workerinput["workerid"].removeprefix("gw"), config.workerinput["workercount"]
        config.args = _in_an_order_of_its_own(config.args, int(place) / count)


def _in_an_order_of_its_own(args: list[str], place: float) -> list[str]:
    """The folders of the suite, for each of its processes from another one on: what one has compiled, the others load.
    In the same order all would compile each file at the same time. Its tests are sorted later."""
    if [Path(arg).absolute() for arg in args] != [HERE]:
        return args
    folders = sorted(str(folder) for folder in HERE.iterdir() if any(folder.glob("test_*.py")))
    first = int(place * len(folders)) % len(folders)  # a process that takes another's place has a higher number
    return folders[first:] + folders[:first]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of `-m slow`, files without such a test are not imported at all."""
    if config.option.markexpr != "slow" or not collection_path.match("test_*.py"):
        return None
    return True if "mark.slow" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Those processes are forks of it, too: none of them imports torch for itself."""
    if (server := session.config.stash.get(SHARED, None)) is not None:
        session.config.option.tx = [f"{spec}//python={server.python}" for spec in session.config.option.tx]


def pytest_unconfigure(config: pytest.Config) -> None:
    if (server := config.stash.get(SHARED, None)) is not None:
        server.close()
        del os.environ[FORKED]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


DEADLINE_S, SLOW_DEADLINE_S = 320, 900
"""For one test, fixtures included, and for one marked `slow`, whose fixtures may run many processes. pyproject.toml's
faulthandler_timeout, a little shorter than the first, shows where a test waits."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that waits for ever fails, and its name is known; the others go on."""
    signal.signal(signal.SIGALRM, _too_late)
    seconds = SLOW_DEADLINE_S if item.get_closest_marker("slow") else DEADLINE_S
    signal.setitimer(signal.ITIMER_REAL, seconds, 20)
    patience.fit_deadline(seconds)


def pytest_runtest_logfinish() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _too_late(*_: object) -> None:
    pytest.fail("waits for ever: not over by its deadline")


LONG = (
    *("test_several_ranks.py", "test_layouts_of_workers.py", "test_torchrun.py"),
    *("test_single_controller.py", "test_ranks.py"),
)
"""With these a divided suite begins: few tests, or so long that nothing would be left to do beside their end."""
TAKES_S = {
    **{"trainer": 0.8, "seeds": 0.7},  # whole runs
    **dict.fromkeys(("commands", "doctor", "rewards", "rollout", "serving"), 0.3),
    **dict.fromkeys(("bench", "engine", "models", "sft", "view", "workers"), 0.2),
}
"""Seconds of the processor that a test of these folders took in the mean; those of others take 0.05."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none; `gpu(interpreter=True)` also run in Triton's interpreter. The
    processes of a divided suite take files in the order of what there is to do in them."""
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        sizes = {path: count * TAKES_S.get(path.parent.name, 0.05) for path, count in counts.items()}
        items.sort(key=lambda item: (item.path.name not in LONG, -sizes[item.path], item.path))
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    for item, marker in marked:
        if not (interpreted and marker.kwargs.get("interpreter")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained two-layer Qwen2 with the byte tokenizer, as a Hugging Face folder."""
    from posttrain.models.embedded import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny", **TINY)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small sums as `train` and `test` files."""
    from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

    return write_files(tmp_path_factory.mktemp("sums"), arithmetic_rows(max_operand=10))


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs code that is to be killed, in a fork of a process that has imported everything."""
    if shared := os.environ.get(FORKED):
        yield Forked(shared)
        return
    server = Forked()
    yield server
    server.close()


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder; only the compiled kernels are those of the machine, as making them takes long."""
    from posttrain.cache import cache_folder

    kernels, own = cache_folder() / "kernels", tmp_path / "cache"
    kernels.mkdir(parents=True, exist_ok=True)
    own.mkdir()
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("POSTTRAIN_CACHE", str(own))
    return own


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what divides its work among OpenMP threads: two of them, also where the suite has one core for itself."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _registered_names_are_gone_after_a_test() -> Iterator[None]:
    """Estimators, losses, samplers, engines, tools, agents and scorers of a test's own are nobody else's."""
    from posttrain.registry import REGISTRIES, registered_by

    before = {kind: dict(registry) for kind, registry in list(REGISTRIES.items())}  # reading one may make others
    yield
    for kind in REGISTRIES.keys() - before.keys():  # its module was first imported by the test
        for name in registered_by(kind, lambda module: not module.startswith("posttrain.")):
            del REGISTRIES[kind][name]
    if "posttrain.external" in sys.modules:
        sys.modules["posttrain.external"]._loaded.clear()  # files register again
    for kind, entries in before.items():
        if REGISTRIES[kind] != entries:
            REGISTRIES[kind].clear()
            REGISTRIES[kind].update(entries)
    if "posttrain.config.schema" in sys.modules:  # nor are the settings that they declared
        sys.modules["posttrain.config.schema"].place_declared_settings()
