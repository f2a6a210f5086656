"""Where workers run. `local` calls them in this process; the trainer cannot tell the difference."""
