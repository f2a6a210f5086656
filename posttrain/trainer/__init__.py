"""The loops: PPO family, SFT, generation, evaluation; each is an entry for `python -m`."""
