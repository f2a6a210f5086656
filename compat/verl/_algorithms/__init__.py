"""verl's algorithms by posttrain's: the same signatures and numbers, the work done in `posttrain.algorithms`."""
