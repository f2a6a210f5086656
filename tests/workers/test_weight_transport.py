"""Every transport brings weights to other processes bit for bit; one that breaks off ends with an error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import metrics_of, run
from textbook import ACTOR, CPU, MODEL, ROLLOUT, batch, ppo_config

from posttrain.controller.pool import LocalWorkers
from posttrain.errors import UserError
from posttrain.external import import_external
from posttrain.models.loading import load_tokenizer
from posttrain.models.lora import merged_state
from posttrain.rollout.weight_buckets import Bucket, SyncError, split_into_buckets
from posttrain.workers.fsdp_workers import PolicyWorker, RolloutWorker
from posttrain.workers.groups import DisaggregatedGroup, PolicyGroup, RolloutGroup
from posttrain.workers.weight_transport import (
    TRANSPORTS,
    Endpoint,
    InCall,
    Place,
    Route,
    SharedMemory,
    check_transport,
    choose,
    place_of,
    route_for,
)

WEIGHTS = {
    "large": torch.arange(40_000.0),
    "odd": torch.arange(7).to(torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "last": torch.randint(-9, 9, (5, 300)),
}


@contextmanager
def connected(transport: str, receivers: int = 1) -> Iterator[tuple[Endpoint, list[Endpoint], ThreadPoolExecutor]]:
    """A sender and its receivers, as threads."""
    ends = [Endpoint(CPU) for _ in range(1 + receivers)]
    with ThreadPoolExecutor(len(ends)) as threads:
        route = ends[0].host(Route(transport, len(ends), timeout_s=20))
        list(threads.map(lambda end, rank: end.join(route, rank), ends, range(len(ends))))
        yield ends[0], ends[1:], threads
        for end in ends:
            end.transport.close()


def carry(sender: Endpoint, receivers: list[Endpoint], threads: ThreadPoolExecutor, weights: Any) -> list[Any]:
    """What each receiver has in the end. The next bucket is gathered before the one before it was taken."""

    def take(receiver: Endpoint, bucket: Bucket) -> dict[str, torch.Tensor]:
        found = receiver.transport.receive(bucket)
        found.check()
        copies = {name: tensor.clone() for name, tensor in found.tensors.items()}
        receiver.transport.loaded(last=bucket.last)
        return copies

    have: list[dict[str, torch.Tensor]] = [{} for _ in receivers]
    taking: list[Any] = []
    for bucket in split_into_buckets(weights.items(), limit=20_000, buffer=sender.transport.buffer):
        sent = sender.transport.send(bucket)
        assert isinstance(sender.transport, InCall) or sent.data is None or not sent.nbytes
        for own, part in zip(have, taking, strict=False):
            own.update(part.result())
        taking = [threads.submit(take, receiver, sent) for receiver in receivers]
    for own, part in zip(have, taking, strict=True):
        own.update(part.result())
    sender.transport.finish()
    return have


@pytest.mark.parametrize(("transport", "receivers"), [("ray", 1), ("ipc", 2), ("gloo", 1), ("gloo", 2)])
def test_every_receiver_has_all_weights_bit_for_bit_in_one_sync_after_the_other(transport, receivers):
    with connected(transport, receivers) as ends:
        # The second sync has larger buckets, so that buffers grow; the third uses them again.
        for weights in (WEIGHTS, {name: torch.cat([one.flatten()] * 3) for name, one in WEIGHTS.items()}, WEIGHTS):
            for found in carry(*ends, weights):
                assert list(found) == list(weights)
                assert all(torch.equal(found[name], weights[name]) for name in weights)
                assert all(found[name].dtype is weights[name].dtype for name in weights)


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
def test_a_bucket_that_changed_on_the_way_is_noticed_by_its_checksum(transport):
    with connected(transport) as (sender, (receiver,), threads):
        (bucket,) = split_into_buckets(WEIGHTS.items(), buffer=sender.transport.buffer)
        assert bucket.data is not None
        bucket.data[8_000] ^= 1  # within `large`; gloo has nothing else to send it from, either
        sent = sender.transport.send(bucket)
        with pytest.raises(SyncError, match="the weight large reached a rollout worker with another checksum"):
            threads.submit(lambda: receiver.transport.receive(sent).check()).result()


# Joins, and reads nothing.
RECEIVER = """
import os, sys, time
import torch
from posttrain.workers.weight_transport import Endpoint, Route
print(os.getpid(), flush=True)
end = Endpoint(torch.device("cpu"))
end.join(Route("gloo", 2, port=int(sys.argv[1])), 1)
time.sleep(600)
"""


@pytest.mark.parametrize(("number", "timeout_s"), [(signal.SIGKILL, 600.0), (signal.SIGSTOP, 2.0)])
def test_a_receiver_that_dies_or_stops_during_a_broadcast_ends_it_with_an_error(number, timeout_s, forked):
    """A dead one is noticed at once, a stopped one when the time for a bucket is over."""
    sender = Endpoint(CPU)
    route = sender.host(Route("gloo", 2, timeout_s=timeout_s))
    with subprocess.Popen([forked.python, "-c", RECEIVER, str(route.port)], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        process = int(receiver.stdout.readline())
        try:
            sender.join(route, 0)
            # More than the kernel takes for a process that does not read.
            (bucket,) = split_into_buckets([("w", torch.zeros(2**23))], buffer=sender.transport.buffer)
            sender.transport.send(bucket)
            os.kill(process, number)
            with pytest.raises(ConnectionError, match="by gloo: a rollout worker was lost during a broadcast"):
                sender.transport.finish()
        finally:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            sender.transport.close()


HERE = Place(1, "m", "n", "10.0.0.1", "cpu")


def test_the_transport_follows_from_where_the_workers_are_unless_it_is_set():
    other, far = replace(HERE, process=2), replace(HERE, process=1, machine="m2", network="n2", address="10.0.0.2")
    one, two = replace(HERE, device="GPU-1"), replace(HERE, process=2, device="GPU-2")
    same = replace(two, device="GPU-1")
    assert choose("auto", HERE, [HERE]) == "ray" and choose("auto", HERE, [other]) == "ipc"
    assert choose("auto", HERE, [other, far]) == "gloo" and choose("auto", one, [two]) == "nccl"
    assert choose("auto", one, [same]) == "ipc" and choose("auto", one, [two, same]) == "gloo"
    assert [choose(wanted, HERE, [other]) for wanted in ("ipc", "gloo", "ray")] == ["ipc", "gloo", "ray"]
    with pytest.raises(UserError, match=r"weight_sync=ipc .*different machines or GPUs; set ray, gloo or auto"):
        choose("ipc", HERE, [far])
    with pytest.raises(UserError, match=r"weight_sync=nccl serves workers on cuda, .* some are on cpu; set ray, ipc"):
        choose("nccl", HERE, [other])
    with pytest.raises(UserError, match=r"weight_sync=nccl needs a GPU of its own .*some share one"):
        choose("nccl", one, [same])
    assert route_for("auto", HERE, [other], 7.0) == Route("ipc", 2, "127.0.0.1", 0, 7.0)
    assert route_for("auto", HERE, [far], 7.0).host == "10.0.0.1"  # of the sender, which the others must reach
    assert place_of(CPU) == place_of(CPU) and place_of(CPU).device == "cpu"
    nowhere = replace(HERE, machine="", network="", address="127.0.0.1")  # without /proc, but on one machine
    assert route_for("auto", nowhere, [replace(nowhere, process=2)], 7.0) == Route("gloo", 2, "127.0.0.1", 0, 7.0)


def expected(places: list[Place]) -> str:
    """What `auto` takes for processes of their own."""
    if places[0].machine and len({(place.machine, place.device) for place in places}) == 1:
        return "ipc"
    return "nccl" if len({place.device for place in places} - {"cpu"}) == len(places) else "gloo"


def test_auto_takes_shared_memory_then_gpus_of_their_own_then_tcp_wherever_two_or_three_workers_are():
    machines = [("m", "n", "10.0.0.1"), ("m2", "n2", "10.0.0.2"), ("", "", "10.0.0.1")]
    kinds = [Place(0, *machine, device) for machine in machines for device in ("cpu", "GPU-1", "GPU-2", "GPU-3")]
    found = Counter[str]()
    for some in [*product(kinds, repeat=2), *product(kinds, repeat=3)]:
        places = [replace(place, process=number) for number, place in enumerate(some)]
        name = choose("auto", places[0], places[1:])
        assert name == expected(places), places
        found[name] += 1
    assert found.total() == 12**2 + 12**3 and found.keys() == {"ipc", "nccl", "gloo"}


# -- a transport of the user's own -------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "weight_sync.md"
(OWN,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
"""The example of the page: the transport `folder`."""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the example, with something replaced, and gives its file; what it registers is forgotten afterwards."""
    monkeypatch.setattr(TRANSPORTS, "_entries", dict(TRANSPORTS))
    monkeypatch.setenv("WEIGHTS_FOLDER", str(tmp_path))

    def written(old: str = "", new: str = "") -> str:
        assert old in OWN
        file = tmp_path / "my_transport.py"
        file.write_text(OWN.replace(old, new) if old else OWN)
        return str(file)

    return written


def test_the_transport_of_the_page_brings_all_weights_bit_for_bit_and_leaves_nothing(own, tmp_path):
    import_external(own())
    left = set(tmp_path.iterdir())
    with connected("folder", 2) as ends:
        for weights in (WEIGHTS, {name: one[:1] for name, one in WEIGHTS.items() if one.dim()}, WEIGHTS):
            for found in carry(*ends, weights):
                assert list(found) == list(weights)
                assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert set(tmp_path.iterdir()) != left
    assert set(tmp_path.iterdir()) == left


def test_a_transport_that_meets_is_given_the_store_of_its_route_at_all_ends(own):
    import_external(own("class Folder(Transport):", "class Folder(Transport):\n    meets = True"))
    with connected("folder", 2) as (sender, receivers, _):
        sender.transport.store.set("key", "value")
        assert [end.transport.store.get("key") for end in receivers] == [b"value"] * 2
        assert [end.transport.rank for end in (sender, *receivers)] == [0, 1, 2]


def test_a_transport_serves_whom_it_declares_and_auto_tries_it_in_its_place(own):
    other, far = replace(HERE, process=2), replace(HERE, process=2, machine="m2")
    import_external(own('placement = "anywhere"', 'placement, auto, engines = "one machine", 5, ("hf",)'))
    assert choose("auto", HERE, [other], "hf") == "folder" and choose("auto", HERE, [other]) == "ipc"
    assert choose("auto", HERE, [far], "hf") == "gloo"
    with pytest.raises(UserError, match=r"weight_sync=folder needs all workers on one machine; set ray, gloo or auto"):
        choose("folder", HERE, [far], "hf")
    with pytest.raises(UserError, match=r"folder serves the rollout engines hf, and rollout\.name is native"):
        choose("folder", HERE, [other])
    with pytest.raises(UserError, match="folder serves workers on cpu, and here some are on cuda; set ray, ipc"):
        choose("folder", replace(HERE, device="GPU-1"), [replace(other, device="GPU-1")], "hf")
    with pytest.raises(UserError, match=r"device of Folder `one machin`\. Did you mean `one machine`\?"):
        import_external(own('placement = "anywhere"', 'placement = "one machin"'))


def test_what_cannot_serve_a_run_is_rejected_before_a_model_is_loaded(tiny_model, own):
    apart = {f"{ROLLOUT}.n_workers": 1}
    import_external(library := own())
    misspelt = ppo_config(tiny_model, {f"{MODEL}.external_lib": library, f"{ROLLOUT}.weight_sync": "foldre"})
    known = r"Unknown weight transport `foldre`. Did you mean `folder`\? Known: folder, gloo, ipc, nccl, ray. .*auto"
    with pytest.raises(UserError, match=known):
        check_transport(misspelt)
    with pytest.raises(UserError, match=r"weight_sync=nccl serves workers on cuda, .* some are on cpu; set ray, ipc"):
        check_transport(ppo_config(tiny_model, {**apart, f"{ROLLOUT}.weight_sync": "nccl"}))
    check_transport(ppo_config(tiny_model, {f"{ROLLOUT}.weight_sync": "nccl"}))  # no weights are sent


def test_policy_and_rollout_sync_by_a_transport_of_the_users_own_and_wrong_bytes_are_named(pair, own, tiny_model):
    import_external(library := own())
    group = pair(weight_sync="folder", external_lib=library)
    assert group.carrier.route.transport == "folder"
    assert group.sync_weights(1) == {**pair(weight_sync="ray").sync_weights(1)}
    receiver = group.rollout.group.worker.receiver.transport
    receive, names = receiver.receive, list[str]()

    def spoiled(bucket: Bucket) -> Bucket:
        found = receive(bucket)
        names.extend(found.tensors)
        for tensor in list(found.tensors.values())[1:]:
            tensor.view(torch.uint8).bitwise_not_()
        return found

    receiver.receive = spoiled
    with pytest.raises(SyncError) as caught:
        group.sync_weights(2)
    assert f"the weight {names[1]} reached a rollout worker with another checksum" in str(caught.value)


SPOILED = """found = numpy.fromfile(bucket.place, dtype="uint8")
        found[bucket.entries[0].nbytes + 64 :] ^= 1"""


@pytest.mark.slow
def test_a_run_with_a_rollout_worker_takes_the_transport_of_external_lib_and_ends_at_wrong_bytes(
    tiny_model, sums, tmp_path, own
):
    pytest.importorskip("ray")
    apart = {"actor_rollout_ref__rollout__n_workers": 1, "actor_rollout_ref__rollout__weight_sync": "folder"}
    library = "actor_rollout_ref__model__external_lib"
    plain = metrics_of(run(tiny_model, sums, tmp_path / "plain").path)
    lines = metrics_of(run(tiny_model, sums, tmp_path / "own", **apart, **{library: own()}).path)
    assert len(lines) == 2 and all("sync/checksum" in line for line in lines)
    of_actor = [
        [{name: line[name] for name in line if name.startswith("actor/")} for line in ran] for ran in (lines, plain)
    ]
    assert of_actor[0] == of_actor[1]
    wrong = own('found = numpy.fromfile(bucket.place, dtype="uint8")', SPOILED)
    with pytest.raises(
        UserError, match=r"the weight model\.layers\.0\S* reached a rollout worker with another checksum"
    ):
        run(tiny_model, sums, tmp_path / "wrong", **apart, **{library: wrong})


@pytest.fixture
def pair(tiny_model, monkeypatch):
    """Policy and rollout in this process, of which the rollout is said to be another one; by settings."""
    other = lambda *given: replace(place_of(*given), process=1)  # noqa: E731
    monkeypatch.setattr("posttrain.workers.rollout.place_of", other)

    def made(**settings: Any) -> DisaggregatedGroup:
        sections = {"lora_rank": MODEL, "external_lib": MODEL}
        named = {f"{sections.get(name, ROLLOUT)}.{name}": value for name, value in settings.items()}
        config = ppo_config(tiny_model, {f"{ACTOR}.optim.lr": 1e-2, f"{ROLLOUT}.n_workers": 1, **named})
        workers, arguments = LocalWorkers(), (config, load_tokenizer(config.actor_rollout_ref.model), CPU)
        training = PolicyGroup(workers.create("policy", PolicyWorker, *arguments, total_updates=8))
        group = DisaggregatedGroup(training, RolloutGroup(workers.create("rollout", RolloutWorker, *arguments)))
        group.init_model()
        return group

    return made


def test_a_run_takes_the_transport_that_is_set_and_joins_again_after_an_error(pair, monkeypatch):
    by_ray = pair(weight_sync="ray")
    assert by_ray.carrier.route.transport == "ray"
    group = pair()
    worker = group.rollout.group.worker
    assert group.carrier.route.transport == "ipc" and isinstance(worker.receiver.transport, SharedMemory)
    assert group.carrier.route.timeout_s == group.training.group.config.trainer.stopped_worker_timeout_s
    # Weights as they were loaded: what two transports bring is the same.
    assert group.sync_weights(1)["sync/checksum"] == by_ray.sync_weights(1)["sync/checksum"]
    first = worker.receiver.transport
    with monkeypatch.context() as patch:
        patch.setattr(worker.engine, "load_weights", lambda weights, version: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            group.sync_weights(2)
    assert group.carrier.route is None
    assert group.sync_weights(2)["sync/probe_max"] < 1e-6 and worker.receiver.transport is not first


def test_buckets_have_the_size_that_is_set(tiny_model):
    weights = [(f"w{number}", torch.zeros(2**18)) for number in range(6)]  # of a MiB each
    for size, count in ((1, 6), (4, 2)):
        worker = PolicyWorker(ppo_config(tiny_model, {f"{ROLLOUT}.update_weights_bucket_megabytes": size}), None, CPU)
        engine: Any = SimpleNamespace(
            on_device=nullcontext, export_weights=lambda: iter(weights), live_model=lambda: None
        )
        worker.engine = engine
        made = [worker.next_bucket(True)]
        while not worker.was_last_bucket():
            made.append(worker.next_bucket(False))
        assert len(made) == count


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_with_lora_only_the_adapters_travel_and_the_rollout_has_the_trainers_weights_bit_for_bit(pair, engine):
    group = pair(name=engine, lora_rank=4)
    training, rollout = group.training.group.worker, group.rollout.group.worker
    group.update_actor(batch())
    sent, transport = list[Bucket](), training.sender.transport
    send = transport.send
    transport.send = lambda bucket: sent.append(bucket) or send(bucket)
    assert group.sync_weights(1)["sync/probe_max"] < 1e-6
    names = [entry.name for bucket in sent for entry in bucket.entries]
    assert names and all(".lora_" in name for name in names)
    there, here = (
        merged_state(getattr(rollout.engine, "decoder", rollout.engine).module),
        dict(training.engine.export_weights()),
    )
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
