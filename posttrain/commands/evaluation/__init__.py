"""`posttrain eval`: responses scored by the rewards of training, with intervals, and two such reports compared."""
