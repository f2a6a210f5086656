"""Attention over packed rows and the log-prob head; each has a plain torch twin that tests compare it with."""
