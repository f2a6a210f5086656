"""What is read of rows while they run, and what they give when they end."""

from __future__ import annotations

from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.native.prompts import NewRow, Prompt
from posttrain.rollout.native.slots import Slots
from posttrain.rollout.native.states import NO_STATE


def write(slots: Slots, slot: int, ids: list[int]) -> None:
    count = int(slots.count[slot])
    slots.tokens[slot, count : count + len(ids)] = ids
    slots.log_probs[slot, count : count + len(ids)] = [-float(one) for one in ids]
    slots.count[slot] += len(ids)


def test_a_row_gives_its_tokens_once_however_often_it_was_read_and_whose_weights_made_them():
    slots, prompt = Slots(2), Prompt("row", (1, 2), gap=2, blocks=[0])
    request = Request("row", [1, 2], Sampling(max_tokens=8), seed=0)
    [slot] = slots.add([NewRow(request, prompt, [0, 1], NO_STATE, 8)]).tolist()
    for ids in ([5, 6], [7]):
        write(slots, slot, ids)
        slots.read([slot])
        slots.note_version([slot], 1)
    write(slots, slot, [8])
    [output] = slots.outputs({slot: "length"}, 2)
    assert output.token_ids == [5, 6, 7, 8] and list(output.log_probs) == [-5.0, -6.0, -7.0, -8.0]
    assert output.versions == [(1, 3), (2, 1)]
    slots.drop(slot)
    [again] = slots.add([NewRow(request, prompt, [0, 1], NO_STATE, 8)]).tolist()
    write(slots, again, [9])
    assert slots.outputs({again: "stop"}, 2)[0].token_ids == [9] and output.token_ids == [5, 6, 7, 8]
