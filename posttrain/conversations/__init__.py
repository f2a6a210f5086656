"""Responses of several turns: one loop and one runner, over any rollout engine.

conversation.py   the ledger of one conversation: its branches, and how agents put rows together themselves
branch.py         one row of it: sampled tokens and observation tokens, with masks and log-probs
loop.py           drives all conversations of a run: generate, hand the turn to the agent, generate again
runner.py         runs agents beside the rollout, with deadlines
chat.py           a conversation as an agent sees it
agents.py         agents by name; the built-in one answers tool calls
environments.py   classes with `reset` and `step`, as agents; adapters.py: those of verl, OpenEnv and verifiers
server.py         one engine for many requests; serving/: HTTP APIs over it
ledger.py         matches messages that a client sends back to the turns that were sampled
programs.py       programs as agents, each with a base URL; program_process.py: their processes
tools/            tools, and what runs their calls; formats/: how models write calls
"""
