"""Tools that a model calls while it answers: what one is, those that are built in, and what runs their calls.

`make_tools(["calculator"], {})` gives them by name, `ToolRunner` answers calls beside the rollout. No torch here.
"""
