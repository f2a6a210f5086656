"""`posttrain compat check SCRIPT`: a run script of verl read without running it, and the answer to each of its keys."""
