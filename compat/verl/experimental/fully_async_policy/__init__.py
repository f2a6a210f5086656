"""Responses of later steps are generated while this one trains: `trainer.max_staleness`."""
