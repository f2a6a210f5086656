"""A program of the `openai` client that guesses a number: `agent.program="python guess_openai.py"`."""

from game import hint, main, score
from openai import OpenAI


def play(client, messages, secret):
    """Two guesses, with a hint between them."""
    messages = list(messages)
    for _ in range(2):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
        said = (answer.content or "").strip()
        told = hint(said, secret)
        if told is None:
            break
        messages += [answer.model_dump(), {"role": "user", "content": told}]
    return score(said, secret)


if __name__ == "__main__":
    main(play, OpenAI)
