"""Interactions: classes that answer the model's turns as a user would.

A file of them is named by `actor_rollout_ref.rollout.multi_turn.interaction_config_path`.
"""
