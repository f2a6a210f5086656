"""`posttrain selftest`: whether training over several devices is right on this machine, as a report to attach."""
