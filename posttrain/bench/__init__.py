"""The same work here and in peer systems, side by side: `posttrain bench rollout|step|train|sync|sweep`."""
