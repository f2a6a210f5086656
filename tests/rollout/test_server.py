"""Many conversations over one engine: each gets what it would get alone, and none waits for the others to end."""

import asyncio
from unittest.mock import Mock

import pytest

from posttrain.config.rollout import RolloutConfig
from posttrain.conversations.server import Server
from posttrain.errors import UserError
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import tiny


def engines():
    module = tiny("qwen2")
    return {
        "native": build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None)[0],
        "hf": HFEngine(module, pad_token_id=0),
    }


async def talk(server, number, turns=3):
    """A conversation: each turn's prompt holds all that was said. Gives what the model said."""
    said, prompt = [], [number + 1, 2, 3]
    for turn in range(turns):
        parent = (number, turn - 1) if turn else None
        sampling = Sampling(max_tokens=3 + number % 5)
        output = await server.generate(Request((number, turn), prompt, sampling, 10 * number + turn, parent, keep=True))
        prompt = [*prompt, *output.token_ids, 50]
        said.append(output.token_ids)
    return said


def alone(engine, number):
    said, prompt = [], [number + 1, 2, 3]
    for turn in range(3):
        (output,) = generate(engine, [prompt], [Sampling(max_tokens=3 + number % 5)], [10 * number + turn])
        prompt = [*prompt, *output.token_ids, 50]
        said.append(output.token_ids)
    return said


@pytest.mark.parametrize("name", ["native", "hf"])
def test_conversations_side_by_side_say_what_each_says_alone(name):
    async def main():
        async with Server(engines()[name]) as server:
            return await asyncio.gather(*(talk(server, number) for number in range(12)))

    plain = engines()[name]
    assert asyncio.run(main()) == [alone(plain, number) for number in range(12)]


def test_a_short_turn_does_not_wait_for_a_long_one():
    async def main():
        engine = engines()["native"]
        engine.rounds.tokens_per_step = 1
        async with Server(engine) as server:
            long = asyncio.create_task(server.generate(Request("long", [1, 2], Sampling(max_tokens=2000), 0)))
            short = [await server.generate(Request(n, [3, n], Sampling(max_tokens=2), n)) for n in range(5)]
            under_way = not long.done()
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            last = await server.generate(Request("last", [4], Sampling(max_tokens=2), 0))
            return under_way, len(short), len(last.token_ids), engine.has_work()

    assert asyncio.run(main()) == (True, 5, 2, False)  # what was cancelled is aborted


def test_the_error_of_a_step_reaches_everybody_who_waits_and_the_next_request_is_served():
    async def main():
        engine = engines()["native"]
        plain, engine.step = engine.step, lambda: 1 / 0
        async with Server(engine) as server:
            tasks = [server.generate(Request(n, [3, n], Sampling(max_tokens=2), n)) for n in range(3)]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            engine.step = plain
            after = await server.generate(Request(0, [3], Sampling(max_tokens=2), 0))
            return [type(error) for error in errors], len(after.token_ids)

    assert asyncio.run(main()) == ([ZeroDivisionError] * 3, 2)


def test_an_id_that_is_under_way_is_refused():
    async def main():
        async with Server(engines()["native"]) as server:
            first = asyncio.create_task(server.generate(Request(0, [1], Sampling(max_tokens=500), 0)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="under way"):
                await server.generate(Request(0, [1], Sampling(max_tokens=2), 0))
            first.cancel()

    asyncio.run(main())


def test_a_request_that_is_refused_is_its_makers_error_alone():
    async def main():
        async with Server(engines()["native"]) as server:
            good = [server.generate(Request(n, [3, n], Sampling(max_tokens=4), n)) for n in range(2)]
            bad = server.generate(Request("bad", [3], Sampling(max_tokens=10**9), 0))
            return await asyncio.gather(*good, bad, return_exceptions=True)

    first, second, refused = asyncio.run(main())
    assert (len(first.token_ids), len(second.token_ids)) == (4, 4)
    assert isinstance(refused, UserError) and "key/value cache" in str(refused)


def test_an_id_whose_request_ended_as_it_was_cancelled_can_be_used_again():
    async def main():
        async with Server(engines()["native"]) as server:
            first = asyncio.create_task(server.generate(Request("id", [1], Sampling(max_tokens=1), 0)))
            while "id" not in server._waiting:
                await asyncio.sleep(0)
            future = server._waiting["id"]
            future.cancel()  # as its task is being cancelled; the driver finds that it has ended
            server._waiting.pop("id")
            with pytest.raises(asyncio.CancelledError):
                await first
            return not server._given_up

    assert asyncio.run(main())


def test_nobody_waits_for_an_engine_that_cannot_even_give_up():
    async def main():
        engine = engines()["native"]
        engine.step = engine.abort = lambda *ids: 1 / 0
        server = Server(engine)
        await server.__aenter__()
        task = asyncio.create_task(server.generate(Request(0, [3], Sampling(max_tokens=2), 0)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(task, 5)
        server._driver.exception()

    asyncio.run(main())


def test_an_engine_that_several_processes_hold_has_no_server():
    with pytest.raises(ValueError, match="2 processes hold this engine"):
        Server(Mock(ranks=2))


def test_requests_that_come_while_the_device_is_busy_are_in_the_next_step():
    async def main():
        engine, steps = engines()["native"], []
        engine.rounds.tokens_per_step = 1
        step, submit, submitted = engine.step, engine.submit, []
        engine.submit = lambda request: (submitted.append(request.id), submit(request))
        engine.step = lambda: (steps.append(len(submitted)), step())[1]
        engine.ahead_s = lambda: 0.0 if len(submitted) == 2 else 60.0
        async with Server(engine) as server:
            first = asyncio.create_task(server.generate(Request(0, [1, 2], Sampling(max_tokens=4), 0)))
            while not submitted:
                await asyncio.sleep(0.001)
            second = server.generate(Request(1, [3, 4], Sampling(max_tokens=4), 1))
            await asyncio.gather(first, second)
        return steps

    assert set(asyncio.run(main())) == {2}  # none with the first request alone
