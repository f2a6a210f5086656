"""A program of the `openai` client with a sub-agent and compaction: `agent.program="python guess_team.py"`.

A game has three guesses. Before the second one a helper, which has a list of messages of its own, proposes a number.
Before the third the history is compacted: what is known by then replaces all earlier turns. Nothing here declares
this. The requests of a game become a tree of rows: the first two guesses, the helper, and the guess after compaction.
"""

from game import LAST, hint, main, score
from openai import OpenAI


def play(client, messages, secret):
    """The last guess counts."""
    history, low, high = list(messages), 1, LAST
    for guess in range(3):
        answer = ask(client, history)
        said = (answer.content or "").strip()
        told = hint(said, secret)
        if told is None or guess == 2:
            return score(said, secret)
        low, high = (max(low, int(said) + 1), high) if told == "higher" else (low, min(high, int(said) - 1))
        if guess == 0:
            proposed = ask(client, [{"role": "user", "content": f"helper: {low} to {high}"}], max_tokens=4).content
            history += [answer.model_dump(), {"role": "user", "content": f"{told}: {proposed}?"}]
        else:
            history = [{"role": "user", "content": f"guess {low} to {high}"}]


def ask(client, messages, **settings):
    return client.chat.completions.create(model="any", messages=messages, **settings).choices[0].message


if __name__ == "__main__":
    main(play, OpenAI)
