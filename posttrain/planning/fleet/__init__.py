"""`posttrain plan --gpus N --model NAME`: which layout of many GPUs fits, how long its stages take, what saturates."""
