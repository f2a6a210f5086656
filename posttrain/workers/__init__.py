"""Workers: roles (actor, rollout, reference, critic) that one process hosts."""
