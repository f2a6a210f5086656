"""What a run needs, decided before it starts: memory by stage, token budgets of a pass, batch sizes."""
