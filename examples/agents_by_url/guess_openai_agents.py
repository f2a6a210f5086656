"""A program of `openai-agents` that guesses a number: `agent.program="python guess_openai_agents.py"`."""

from agents import Agent, OpenAIProvider, RunConfig, Runner
from game import hint, main, score
from openai import AsyncOpenAI

AGENT = Agent(name="guesser", model="any")


def play(client, messages, secret):
    """Two guesses, with a hint between them."""
    config = RunConfig(model_provider=OpenAIProvider(openai_client=client))
    turns = [{"role": one["role"], "content": one["content"]} for one in messages]
    for _ in range(2):
        result = Runner.run_sync(AGENT, turns, run_config=config)
        said = str(result.final_output).strip()
        told = hint(said, secret)
        if told is None:
            break
        turns = [*result.to_input_list(), {"role": "user", "content": told}]
    return score(said, secret)


if __name__ == "__main__":
    main(play, AsyncOpenAI)
