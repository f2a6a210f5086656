"""Training by Megatron-Core: a model cut over tensor, pipeline and expert ranks (`actor.strategy=megatron`)."""
