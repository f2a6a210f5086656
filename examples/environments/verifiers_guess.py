"""A local environment of the package verifiers (0.4): the model guesses a number, and hears `higher` or `lower`.

Nothing here knows of posttrain. The taskset has a task for every number, the task its reward, and the harness plays.

    PYTHONPATH=examples/environments posttrain train environment=verifiers:verifiers_guess \\
        data.train_files=verifiers:verifiers_guess data.max_response_length=32
"""

import functools

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Guesser", "Numbers"]


class NumberData(vf.TaskData):
    answer: int


class Number(vf.Task[NumberData]):
    @vf.reward
    async def nearness(self, trace: vf.Trace) -> float:
        said = trace.last_reply.strip()
        return 1 - min(abs(int(said) - self.data.answer), 9) / 9 if said.isdecimal() else 0.0


class NumbersConfig(vf.TasksetConfig):
    rounds: int = 16


class Numbers(vf.Taskset[Number, NumbersConfig]):
    def load(self):
        for number in range(9 * self.config.rounds):
            yield Number(NumberData(prompt="guess 1 to 9", answer=number % 9 + 1), self.config.task)


@functools.cache
def connect(endpoint: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint, api_key="each game has its own")


class GuesserConfig(vf.HarnessConfig):
    tries: int = 2


class Guesser(vf.Harness[GuesserConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        # A copy with another key: a client of its own for every game would open its connections anew.
        client = connect(endpoint).with_options(api_key=secret)
        for _ in range(self.config.tries):
            answer = (await client.chat.completions.create(model=ctx.model, messages=messages)).choices[0].message
            said = (answer.content or "").strip()
            if not said.isdecimal() or int(said) == data.answer:
                break
            hint = "higher" if int(said) < data.answer else "lower"
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": hint}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
