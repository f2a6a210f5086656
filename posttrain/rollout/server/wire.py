"""Requests, outputs and weights as bodies of HTTP: JSON, and plain bytes for weights. Nothing is unpickled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch

from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.weight_buckets import Bucket, Entry

# Headers of a request, beside its body: the session that it belongs to, and the policy version of weights.
SESSION, VERSION = "X-Posttrain-Session", "X-Posttrain-Version"
ROOT = "/rollout/v2"
"""Where a server answers runs; the path changes with the protocol."""

Shapes = dict[str, list[Any]]
"""Name of a weight -> [its type, its shape]."""


def write_request(request: Request, number: int, parent: int | None) -> dict[str, Any]:
    """A request under a number: ids may be any object, and stay where they came from."""
    return {
        "id": number,
        "prompt_ids": [int(id) for id in request.prompt_ids],
        "sampling": dataclasses.asdict(request.sampling),
        "seed": request.seed,
        "parent": parent,
        "keep": request.keep,
    }


def read_request(body: dict[str, Any]) -> Request:
    how = body["sampling"]
    sampling = Sampling(**{**how, "stop_token_ids": tuple(how["stop_token_ids"]), "stop": tuple(how["stop"])})
    return Request(body["id"], body["prompt_ids"], sampling, body["seed"], body["parent"], body["keep"])


def write_output(output: Output) -> dict[str, Any]:
    """JSON writes numbers so that they are read back bitwise identical."""
    drawn = output.sampling_log_probs
    return {
        "id": output.id,
        "token_ids": [int(id) for id in output.token_ids],
        "log_probs": _numbers(output.log_probs),
        "finish_reason": output.finish_reason,
        "versions": output.versions,
        "sampling_log_probs": None if drawn is None else _numbers(drawn),
    }


def read_output(body: dict[str, Any], id: Hashable) -> Output:
    spans = [(version, count) for version, count in body["versions"]]
    numbers = body["log_probs"], body["sampling_log_probs"]
    return Output(id, body["token_ids"], numbers[0], body["finish_reason"], spans, numbers[1])


def _numbers(values: Any) -> list[float]:
    return np.asarray(values, np.float64).tolist()  # every float32 is a float64 too


def write_bucket(bucket: Bucket) -> bytes:
    """The length of a JSON header, the header (name, type, shape and checksum of each weight), and the memory."""
    words = json.dumps([[one.name, one.dtype, list(one.shape), one.checksum] for one in bucket.entries]).encode()
    assert bucket.data is not None
    return b"".join([len(words).to_bytes(8, "little"), words, bucket.data.numpy().tobytes()])


def read_bucket(body: bytes) -> Bucket:
    """What `write_bucket` wrote; its checksums are still to be compared."""
    size = int.from_bytes(body[:8], "little")
    entries = [Entry(name, kind, tuple(shape), sum_) for name, kind, shape, sum_ in json.loads(body[8 : 8 + size])]
    # A copy that may be written to, for torch's sake, and begins where any type can be read.
    data = bytearray(memoryview(body)[8 + size :])
    return Bucket(entries, torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


def shapes_of(weights: Iterable[tuple[str, torch.Tensor]]) -> Shapes:
    """The type and shape of each weight."""
    return {name: [str(weight.dtype).removeprefix("torch."), list(weight.shape)] for name, weight in weights}


def tied_names(weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Further names of weights that an earlier name has already. They must all be in memory at once."""
    seen: dict[tuple[int, int], str] = {}
    return [name for name, weight in weights if seen.setdefault((weight.data_ptr(), weight.nbytes), name) != name]
