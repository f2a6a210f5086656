"""What a run leaves behind and shows: its directory, metrics, samples, loggers, curves and the diagnosis line.

Nothing here imports torch: the same code reads a run directory on a machine that only looks at it.
"""
