"""Saving and loading: to the bit, whole or not at all, and only what the manifest vouches for."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from posttrain.checkpoint import CheckpointError, CheckpointManager, verify

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of arbitrary bit patterns, NaNs with payloads included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def actor(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3, 4), float(value)), "step": torch.tensor(7)}


def save(manager: CheckpointManager, step: int, value: float | None = None, **kwargs) -> Path:
    kwargs = {"state": {"step": step}, "rng": {"torch.cpu": torch.get_rng_state()}} | kwargs
    return manager.save(step, tensors={"actor": actor(step if value is None else value)}, **kwargs)


def value_of(manager: CheckpointManager, path: Path) -> float:
    into = actor(-1)
    manager.load_tensors(path, "actor", into)
    return into["weight"][0, 0].item()


def test_tensors_of_every_dtype_come_back_to_the_bit(tmp_path):
    tensors = {str(d): random_bits(d, (5, 3), i) for i, d in enumerate(DTYPES)}
    tensors["scalar"] = torch.tensor(float("nan"))
    tensors["empty"] = torch.empty(0, 4)
    tensors["transposed"] = torch.randn(4, 6).t()
    tensors["view"] = torch.randn(100)[10:20]
    tensors["parameter"] = torch.nn.Parameter(torch.randn(7))
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, tensors={"actor": tensors, "critic": actor(5)}, state={}, rng={})

    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    manager.load_tensors(path, "actor", into)

    assert {name: bits(t) for name, t in into.items()} == {name: bits(t) for name, t in tensors.items()}
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses
    critic = actor()
    manager.load_tensors(path, "critic", critic)
    assert critic["weight"].unique().tolist() == [5.0]


def test_equal_checkpoints_are_equal_files(tmp_path):
    manager = CheckpointManager(tmp_path)
    first, second = save(manager, 1, value=3.0, state={}), save(manager, 2, value=3.0, state={})
    names = [p.relative_to(first) for p in first.rglob("*") if p.is_file() and p.name != "manifest.json"]
    assert len(names) == 4
    assert [(first / n).read_bytes() for n in names] == [(second / n).read_bytes() for n in names]


def test_state_and_rng_come_back_exactly(tmp_path):
    state = {
        "step": 3,
        "epoch": {"position": 0.1 + 0.2, "order": [3, 1, 2]},
        "none": None,
        "inf": float("inf"),
        "text": "ä\n",
    }
    rng = {"torch.cpu": torch.get_rng_state(), "words": torch.tensor([2**62, -1])}
    manager = CheckpointManager(tmp_path)
    path = manager.save(3, tensors={}, state=state, rng=rng)
    assert manager.load_state(path) == state
    loaded = manager.load_rng(path)
    assert loaded.keys() == rng.keys() and all(torch.equal(loaded[k], rng[k]) for k in rng)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {1: 2}}, "state.a has the key 1"),
        ({"a": [0, torch.ones(1)]}, r"state.a\[1\] is a Tensor"),
        ({"s": {1, 2}}, "state.s"),
    ],
)
def test_state_that_json_would_change_is_refused_before_writing(tmp_path, state, named):
    with pytest.raises(TypeError, match=named):
        CheckpointManager(tmp_path).save(1, tensors={}, state=state, rng={})
    assert list(tmp_path.iterdir()) == []


def test_layout_manifest_and_latest_file(tmp_path):
    def export(folder: Path) -> None:
        (folder / "huggingface").mkdir()
        (folder / "huggingface" / "config.json").write_text("{}")

    path = save(CheckpointManager(tmp_path), 12, extra=export)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert path == tmp_path / "global_step_12"
    assert set(files) == {
        "actor/.metadata",
        "actor/__0_0.distcp",
        "huggingface/config.json",
        "rng.safetensors",
        "state.json",
    }
    assert files["huggingface/config.json"]["size"] == 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12\n"
    assert sorted(os.listdir(tmp_path)) == ["global_step_12", "latest_checkpointed_iteration.txt"]


def test_newest_goes_by_number_and_ignores_the_latest_file(tmp_path):
    manager = CheckpointManager(tmp_path)
    assert manager.newest() is None
    for step in (9, 10, 2):
        save(manager, step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("999")
    assert manager.newest() == tmp_path / "global_step_10"


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    manifest = path / "manifest.json"
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new))


def pipe_for(path: Path) -> None:
    """Whoever opens it waits for a writer that never comes."""
    path.unlink()
    os.mkfifo(path)


def folder_for(path: Path) -> None:
    path.unlink()
    path.mkdir()


def copy_of_first(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("global_step_1"), path)


DAMAGES = {
    "flipped bit": (lambda p: flip_byte(p / "actor" / "__0_0.distcp"), "actor/__0_0.distcp: its content differs"),
    "cut file": (lambda p: (p / "state.json").write_bytes(b"{"), "state.json: has 1 bytes instead of"),
    "lost file": (lambda p: (p / "rng.safetensors").unlink(), "rng.safetensors: is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "changed step": (lambda p: edit(p, '"step": 2', '"step": 1'), "manifest.json is not as it was written (sha256)"),
    "changed metric": (lambda p: edit(p, '"metric": null', '"metric": 9.0'), "not as it was written (sha256)"),
    "pipe for a manifest": (lambda p: pipe_for(p / "manifest.json"), "manifest.json cannot be read: it is no plain"),
    "pipe for a file": (lambda p: pipe_for(p / "state.json"), "state.json: is no plain file"),
    "folder for a manifest": (lambda p: folder_for(p / "manifest.json"), "it is no plain file"),
    "manifest of nested lists": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "cannot be read"),
    "another step's folder": (copy_of_first, "is that of step 1: the folder was renamed"),
    "cut manifest": (lambda p: (p / "manifest.json").write_text('{"form'), "manifest.json cannot be read"),
}


@pytest.fixture
def no_waiting():
    """Reading from a pipe would never end: it is interrupted."""

    def interrupt(*_):
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_skipped_and_refused(tmp_path, damage, no_waiting):
    notes: list[str] = []
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    harm, said = DAMAGES[damage]
    harm(save(manager, 2))

    manager = CheckpointManager(tmp_path, on_note=notes.append)
    assert manager.newest() == tmp_path / "global_step_1"
    assert len(notes) == 1 and "global_step_2" in notes[0] and said in notes[0]
    with pytest.raises(CheckpointError, match="is damaged and is not loaded"):
        manager.load_state(tmp_path / "global_step_2")
    assert manager.best() is None  # also of a number that somebody wrote into the manifest


def test_when_all_checkpoints_are_damaged_nothing_starts_over(tmp_path):
    manager = CheckpointManager(tmp_path, on_note=lambda note: None)
    for step in (1, 2):
        flip_byte(save(manager, step) / "state.json")
    with pytest.raises(CheckpointError, match=r"(?s)step_2.*step_1.*does not start over.*experiment_name"):
        manager.newest()


def test_a_checkpoint_of_format_1_is_still_loaded(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = save(manager, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    assert manager.newest() == path and value_of(manager, path) == 3.0


def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*global_step_9; .*run holds none\."):
        manager.load_state(tmp_path / "run" / "global_step_9")
    save(manager, 1)
    save(manager, 12)
    with pytest.raises(CheckpointError, match=r"holds global_step_1; global_step_12\."):
        manager.load_state(tmp_path / "run" / "global_step_9")


def test_what_the_manifest_does_not_list_is_not_loaded(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = save(manager, 1)
    (path / "notes.txt").write_text("mine")
    (path / "actor").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(path / "actor")
    other = save(CheckpointManager(tmp_path / "other"), 1)
    (other / "actor").rename(path / "critic")
    assert verify(path) == []  # a file of the user's does no harm
    with pytest.raises(
        CheckpointError, match=r"holds no critic, only actor: its run trained with other settings.*new run"
    ):
        manager.load_tensors(path, "critic", actor())


def test_manifest_name_that_leads_out_is_a_problem(tmp_path):
    path = save(CheckpointManager(tmp_path), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../latest_checkpointed_iteration.txt"] = {"size": 2, "sha256": ""}
    manifest["format"] = 1  # who prepares a manifest needs no hash
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert verify(path) == ["../latest_checkpointed_iteration.txt: the name leads out of the checkpoint"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.update(weight=torch.zeros(3, 5)),
            r"weight is torch.float32 \(3, 4\) there and torch.float32 \(3, 5\) here",
        ),
        (
            lambda t: t.update(weight=torch.zeros(3, 4).bfloat16()),
            "weight is torch.float32 .* there and torch.bfloat16",
        ),
        (lambda t: t.update(bias=torch.zeros(1)), "bias is not in it"),
        (lambda t: t.pop("step"), "step is in it and not in this run"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(tmp_path, change, named):
    manager = CheckpointManager(tmp_path)
    path = save(manager, 4)
    into = actor(-1)
    change(into)
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(CheckpointError, match=named):
        manager.load_tensors(path, "actor", into)
    assert all(torch.equal(into[name], before[name]) for name in before)


def test_part_of_a_checkpoint_loads_when_asked_for(tmp_path):
    manager = CheckpointManager(tmp_path)
    into = {"weight": torch.zeros(3, 4)}
    manager.load_tensors(save(manager, 4), "actor", into, partial=True)
    assert into["weight"].unique().tolist() == [4.0]
    assert manager.describe(tmp_path / "global_step_4", "actor") == {
        "weight": (torch.Size([3, 4]), torch.float32),
        "step": (torch.Size([]), torch.int64),
    }


def test_keep_leaves_the_newest_and_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep=2)
    for step, metric in [(1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, float("nan")), (6, 0.1)]:
        save(manager, step, metric=metric)
    assert manager.steps() == [2, 5, 6]
    assert manager.best() == (2, 0.9)
    assert CheckpointManager(tmp_path).best() == (2, 0.9)  # remembered across a restart
    with pytest.raises(CheckpointError, match="max_ckpt_to_keep=0"):
        CheckpointManager(tmp_path, keep=0)


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 5, value=1.0)
    assert manager.newest()
    assert value_of(manager, save(manager, 5, value=2.0)) == 2.0
    assert manager.steps() == [5] and len(os.listdir(tmp_path)) == 2


def test_later_checkpoints_are_set_aside_not_deleted(tmp_path):
    notes: list[str] = []
    manager = CheckpointManager(tmp_path, on_note=notes.append)
    for step in (1, 2, 3):
        save(manager, step)
    assert [p.name for p in manager.set_aside_after(1)] == ["set_aside_global_step_2", "set_aside_global_step_3"]
    assert manager.steps() == [1] and "global_step_2" in notes[0]
    assert verify(tmp_path / "set_aside_global_step_3") == []


def test_full_disk_is_said_and_leaves_no_half_folder(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # a real refusal by the kernel, in the midst of a file
    try:
        with pytest.raises(
            CheckpointError, match=r"no room for it: about 0\.\d+ GiB are needed.*max_ckpt_to_keep"
        ) as caught:
            manager.save(2, tensors={"actor": {"w": torch.zeros(500_000)}}, state={}, rng={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "global_step_2" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    assert value_of(manager, tmp_path / "global_step_1") == 1.0


def test_closed_folder_is_said(tmp_path, monkeypatch):
    def refuse(self: Path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    manager = CheckpointManager(tmp_path / "checkpoints")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied.*cannot be written to.*trainer\.default_local_dir"):
        save(manager, 1)


def test_error_in_the_export_leaves_nothing(tmp_path):
    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("no such layer")

    with pytest.raises(CheckpointError, match="RuntimeError: no such layer"):
        save(CheckpointManager(tmp_path), 1, extra=broken)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_tensors_are_written_is_ctrl_c_and_no_failed_write(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.checkpoint.parts._HashingStream.write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(CheckpointManager(tmp_path), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_of_by_ranks_that_write_together_as_by_one(tmp_path):
    """What ranks send one another loses what it was raised from; the library's own words say nothing of a disk."""
    from torch import distributed

    from posttrain.checkpoint.parts import RolePart

    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OSError, match="No space left on device"):
            RolePart(tmp_path, {"weight": torch.zeros(100_000)}, together=True).save()
    finally:
        distributed.destroy_process_group()
