"""A rollout engine in another process or on another machine, reached by its URL; weights are pushed to it.

wire.py      requests, outputs and weights as bodies of HTTP: JSON, and plain bytes for weights; nothing is unpickled
host.py      the far side (`posttrain serve MODEL --accept-weights`): an engine that does what a run asks for
engine.py    the near side (`actor_rollout_ref.rollout.name=server`): connects, compares the servers' model with the
             trainer's, and is a rollout engine over one or several servers
"""
