"""`posttrain generate`: responses of a model to the prompts of a file, written so that a killed run can continue."""
