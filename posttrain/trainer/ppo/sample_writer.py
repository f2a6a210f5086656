"""Samples whose tokens lie in Ray's store are read, decoded and written by a process of their own.

The driver sends it references, so that a step whose samples are written costs the driver the same however long the
responses are. It runs on the driver's machine, where the run directory is, and starts with the first batch that is
large: reading a small one here costs less than a process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

from posttrain.batch.columns import Held, StoredColumn
from posttrain.batch.compact import lengths_of
from posttrain.controller.rank_host import Parcel, pack, unpack
from posttrain.errors import first_line
from posttrain.protocol import DataProto
from posttrain.tracking.samples import sample_table_in_parts, used_fields, write_step

LARGE = 32_000_000  # bytes of a batch's tokens and log-probs
TOKEN_BYTES = 20  # of a token in the samples: its id, and four numbers

Note = Callable[[str], object]


class SampleHost:
    """Becomes a Ray actor."""

    def __init__(self, folder: str, paths: list[str], tokenizer: bytes) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        import cloudpickle

        self.tokenizer = cloudpickle.loads(tokenizer)

    def write(self, parcel: Parcel, folder: str, step: int, sampling: dict[str, Any]) -> None:
        """`step_<step>.parquet` of the packed batch."""
        batch: DataProto = unpack(parcel)
        batch.set_decoder(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True))
        write_step(folder, step, sample_table_in_parts(step, batch, sampling=sampling))


class SampleWriter:
    """The driver's side; the process is started when it is first needed, and again if it was lost, or has not answered
    for `limit_s` seconds."""

    def __init__(self, tokenizer: Any, note: Note, limit_s: float) -> None:
        self._tokenizer, self._note = tokenizer, note
        self._host: Any = None  # Ray's handle
        self._limit_s = limit_s if math.isfinite(limit_s) else None

    @staticmethod
    def takes(batch: DataProto) -> bool:
        """Whether this batch lies elsewhere and is large."""
        column = batch.batch.columns().get("responses")
        if not isinstance(column, StoredColumn) or all(isinstance(h, Held) for h in column.places.holders):
            return False
        return TOKEN_BYTES * sum(int(length.sum()) for length in lengths_of(batch)) > LARGE

    def job(
        self, folder: str | os.PathLike[str], step: int, batch: DataProto, sampling: dict[str, Any]
    ) -> Callable[[], None]:
        """What writes them, to be called in a thread. From now on the batch may be freed here."""
        parcel = packed_samples(batch)

        def work() -> None:
            import ray
            from ray.exceptions import GetTimeoutError, RayError, RayTaskError

            for last in (False, True):
                try:
                    written = self._started().write.remote(parcel, os.fspath(folder), step, sampling)
                    ray.get(written, timeout=self._limit_s)
                    return
                except RayError as error:
                    if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
                        raise error.cause from error  # such as a full disk: it ends the run as it would here
                    if isinstance(error, GetTimeoutError):
                        ray.kill(self._host)  # it was stopped, or waits for a worker that was: the run would never end
                    self._host = None
                    # The worker that held the responses is gone with them, or the process itself was lost twice.
                    if last:
                        self._note(f"note: the samples of step {step} were not written: {first_line(error)}")

        return work

    def _started(self) -> Any:
        if self._host is None:
            import cloudpickle
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(num_cpus=0)(SampleHost).options(scheduling_strategy=here)
            self._host = actor.remote(os.getcwd(), list(sys.path), cloudpickle.dumps(self._tokenizer))
        return self._host


def packed_samples(batch: DataProto) -> Parcel:
    """What is written of a batch, packed for Ray: numbers of responses, and references to their tokens."""
    tensors, others = (used_fields(part.columns()) for part in (batch.batch, batch.non_tensor_batch))
    return pack(batch.select(tensors, others, []).set_decoder(None))
