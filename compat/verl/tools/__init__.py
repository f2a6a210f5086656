"""Tools by verl's interface. A file of them is named by `actor_rollout_ref.rollout.multi_turn.tool_config_path`."""
