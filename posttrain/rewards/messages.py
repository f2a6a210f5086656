"""The messages between a RewardPool and one of its workers (`machines/channel.py` is their connection).

To the worker: the RewardSpec, then chunks of tasks [(task's number, [Payload, ...]), ...]
From it:       ("ready", spec) or ("failed", what, todo); ("print", line); ("wait", seconds);
               ("done", number, [(score, parts, error), ...], start, end);
               ("back", seconds of a task): gives back the rest of its chunk
               ("damage", what, what was restored): after a "done", if its score changed what all scores of a worker
               share (worker.py). If `what` is not empty, the worker ends.

A worker sends each answer at once, into the socket's buffer. There it is safe whatever the worker does next, and the
pool reads many at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

# Pickled (data_source, ground_truth, extra_info), followed by (prompt, progress) for functions of TRL's form; the
# response, its number of tokens, the part that the model wrote if that is not all, and the token ids for TRL's form.
Payload = tuple[bytes, str, "int | None", "str | None", "Sequence[int] | None"]

# Seconds of work in one chunk; a worker gives back the tasks that it has not begun by then.
CHUNK_S = 0.05
# Most tasks in a chunk. All their answers fit into the socket's buffer, so that a worker never blocks on sending.
CHUNK = 512
