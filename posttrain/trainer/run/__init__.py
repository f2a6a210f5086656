"""What every trainer does around its loop: the process, the directory, signals, external modules, the result."""
