"""A program of the `anthropic` client that guesses a number: `agent.program="python guess_anthropic.py"`."""

from anthropic import Anthropic
from game import hint, main, score


def play(client, messages, secret):
    """Two guesses, with a hint between them."""
    messages = [{"role": one["role"], "content": one["content"]} for one in messages]
    for _ in range(2):
        answer = client.messages.create(model="any", max_tokens=8, messages=messages)
        said = "".join(block.text for block in answer.content if block.type == "text").strip()
        told = hint(said, secret)
        if told is None:
            break
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": told}]
    return score(said, secret)


if __name__ == "__main__":
    main(play, Anthropic, version="")
