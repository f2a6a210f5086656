"""Several turns: a model calls tools while it answers, and reads what they say."""
