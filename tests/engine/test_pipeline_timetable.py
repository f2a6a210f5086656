"""The timetable of a pipeline: every step comes after what it needs, and stages hold no more than they must."""

from __future__ import annotations

import pytest

from posttrain.engine.pipeline import Step, timetable

SHAPES = [(stages, chunks, passes) for stages in (1, 2, 3, 4) for chunks in (1, 2, 3) for passes in (1, 2, 5, 8)]


def moments(stages: int, chunks: int, passes: int, *, backward: bool) -> dict[tuple[int, Step], int]:
    """(place in the model, step) -> its moment."""
    found = {}
    for moment, tick in enumerate(timetable(stages, chunks, passes, backward=backward)):
        for stage, step in enumerate(tick):
            if step is not None:
                found[step.chunk * stages + stage, step] = moment
    return found


@pytest.mark.parametrize(("stages", "chunks", "passes"), [shape for shape in SHAPES if shape[0] > 1 or shape[1] == 1])
def test_every_step_is_made_once_and_after_what_it_needs(stages, chunks, passes):
    places = stages * chunks
    found = moments(stages, chunks, passes, backward=True)
    assert len(found) == 2 * places * passes
    for (place, step), moment in found.items():

        def other(place: int, backward: bool, step: Step = step) -> int:
            return found[place, Step(step.number, place // stages, backward)]

        if step.backward:
            assert other(place, False) < moment
            assert place == places - 1 or other(place + 1, True) < moment
        else:
            assert place == 0 or other(place - 1, False) < moment
    forwards = moments(stages, chunks, passes, backward=False)
    assert len(forwards) == places * passes and not any(step.backward for _, step in forwards)


def held(stages: int, chunks: int, passes: int) -> list[int]:
    """By stage: most chunks of passes whose activations it holds at once."""
    now, most = [0] * stages, [0] * stages
    for tick in timetable(stages, chunks, passes, backward=True):
        for stage, step in enumerate(tick):
            if step is not None:
                now[stage] += -1 if step.backward else 1
                most[stage] = max(most[stage], now[stage])
    return most


def test_a_stage_holds_as_many_passes_as_there_are_stages_behind_it():
    assert held(1, 1, 8) == [1]
    assert held(4, 1, 8) == [4, 3, 2, 1]
    assert held(4, 2, 8) == [11, 9, 7, 5]  # of half a stage each


@pytest.mark.parametrize(("stages", "passes"), [(2, 4), (4, 8), (4, 16)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_divide_the_time_that_a_stage_waits(stages, passes, chunks):
    """A forward step of a chunk takes 1 and a backward step 2: all stages work for 3 x chunks x passes."""
    ready: dict[tuple[int, Step], int] = {}
    free = [0] * stages
    for tick in timetable(stages, chunks, passes, backward=True):
        for stage, step in enumerate(tick):
            if step is None:
                continue
            place = step.chunk * stages + stage
            before = place + (1 if step.backward else -1)
            needed = ready.get((before, step._replace(chunk=before // stages)), 0)
            free[stage] = max(free[stage], needed) + (2 if step.backward else 1)
            ready[place, step] = free[stage]
    assert max(free) - 3 * chunks * passes == 3 * (stages - 1)  # chunks are as many times smaller
