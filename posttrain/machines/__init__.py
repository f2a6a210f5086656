"""Worker processes on all machines of a run's Ray: of reward functions, of tools and of agents.

channel.py   messages between a worker process and its user
spawn.py     starts a Python that imports this posttrain
host.py      on each other machine: starts worker processes there, and passes bytes on
cluster.py   in the driver: those machines, and where the next process is started
"""
