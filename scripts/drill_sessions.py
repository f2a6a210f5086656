"""Many programs at once over one run's server: are the ids that clients were sent those that are trained?

    python scripts/drill_sessions.py [SESSIONS] [TURNS] [tree]

A second process plays the programs: all sessions at once, each of so many turns, with `return_token_ids`. The embedded
model samples. In the end every id that a client was sent must be a trained token of its sample, in order, once. With
`tree` two sub-agents are asked at once after each turn, and every second turn the history is compacted.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from needs import need

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
need("aiohttp", get="pip install 'posttrain[serve]'")
KEY = "drill"


async def play_all(run: str, sessions: int, turns: int, tree: str = "") -> None:
    """The programs: claims all sessions, plays them at once, and prints the ids that came."""
    import aiohttp

    headers = {"Authorization": f"Bearer {KEY}"}
    sent: dict[str, list[list[int]]] = {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:

        async def post(url: str, body: object) -> dict:
            async with http.post(url, json=body, timeout=aiohttp.ClientTimeout(None)) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        async def play(found: dict) -> None:
            async def ask(messages: list) -> dict:
                body = {"messages": messages, "max_tokens": 8, "return_token_ids": True}
                choice = (await post(f"{found['base_url']}/chat/completions", body))["choices"][0]
                sent.setdefault(str(found["task"]["index"]), []).append(choice["token_ids"])
                return choice["message"]

            messages = list(found["task"]["messages"])
            for turn in range(turns):
                messages += [await ask(messages), {"role": "user", "content": f"{turn} + {turn} = ?"}]
                if tree:
                    await asyncio.gather(*(ask([{"role": "user", "content": f"{turn} + {one}"}]) for one in "37"))
                if tree and turn % 2:
                    messages = messages[-1:]
            await post(f"{run}/s/{found['id']}/reward", {"reward": 1.0})

        playing = []
        while len(playing) < sessions:
            found = await post(f"{run}/s/next", {})
            if found["id"] is None:
                await asyncio.sleep(0.05)
            else:
                playing.append(asyncio.ensure_future(play(found)))
        await asyncio.gather(*playing)
    print(json.dumps(sent))


def trained_turns(rows: list) -> list[list[int]]:
    """The trained ids of each turn."""
    turns = []
    for row in rows:
        ids, start = row.ids[-row.length :], 0
        for _, end in row.turn_ends:
            turns.append([id for id, own in zip(ids[start:end], row.mask[start:end], strict=True) if own])
            start = end
    return turns


def main(sessions: int, turns: int, tree: str = "") -> int:
    """Runs the sessions and counts; 0 if all ids agree."""
    os.environ["POSTTRAIN_API_KEY"] = KEY
    import torch

    from posttrain.commands.generation.loop import Requests
    from posttrain.config.root import PPOConfig
    from posttrain.conversations.opening import open_conversations
    from posttrain.models.loading import load_tokenizer
    from posttrain.rollout.base import Sampling
    from posttrain.rollout.engines import build_engine
    from posttrain.trainer.embedded import ensure_embedded

    config = PPOConfig()
    config.actor_rollout_ref.model.path = folder = str(ensure_embedded(print) / "model")
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    config.actor_rollout_ref.rollout.agent = {"program": "outside", "timeout_s": 600.0}
    config.data.max_prompt_length, config.data.max_response_length = 64, 48 * turns
    engine, _ = build_engine(config.actor_rollout_ref.rollout, folder, tokenizer)
    engine.wake()
    device = torch.device("cuda")  # nothing is computed there: turns are admitted as they come
    with open_conversations(config, tokenizer, device, print) as loop:
        assert loop is not None
        run = loop.agents.context["programs"].url
        requests = Requests(engine, Sampling(max_tokens=64, stop_token_ids=(tokenizer.eos_token_id,)), loop)
        command = [sys.executable, __file__, "--play", run, str(sessions), str(turns), tree]
        playing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        prompt = [{"role": "user", "content": "15 + 6 = ?"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        started = time.perf_counter()
        for number in range(sessions):
            row = {"raw_prompt": prompt, "data_source": "", "ground_truth": "", "extra_info": {}, "index": number}
            requests.submit((number, 0), list(ids), number, row)
        whole = []
        while requests.has_work():
            whole += requests.advance()
        seconds = time.perf_counter() - started
        sent = json.loads(playing.communicate()[0])
        wrong = failed = tokens = rows = turn_count = 0
        for output in whole:
            record = loop.records[output.id]
            failed += record.error is not None
            rows += len(record.rows)
            trained, given = trained_turns(record.rows), sent[str(output.id[0])]
            turn_count += len(given)
            tokens += sum(map(len, given))
            # Turns that were asked for at once have no order.
            wrong += sorted(trained) != sorted(given) if tree else trained != given
        print(
            f"{sessions} sessions of {turns} turns at once: {tokens} ids were sent to clients; {sessions - wrong} "
            f"samples train exactly these, {wrong} do not; {failed} failed; {rows} rows; {seconds:.1f} s, "
            f"{turn_count / seconds:.0f} requests/s"
        )
    return int(bool(wrong or failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        asyncio.run(play_all(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
    else:
        sessions, turns, *rest = sys.argv[1:] or (1000, 3)
        sys.exit(main(int(sessions), int(turns), *rest))
