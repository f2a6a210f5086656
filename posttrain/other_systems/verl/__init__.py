"""verl's configuration keys and posttrain's answers to them, in tables that the docs are made from.

`rule.py` says what a rule is; `renamed.py`, `actor.py`, `rollout.py`, `run.py` and `supervised.py` hold the tables;
`keys.txt` every key known of verl; `answers.py` finds a key's answer and acts on it, by `translations.py` where a key
means something else here.
"""
