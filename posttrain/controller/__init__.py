"""Where workers run. `local` calls one in this process, `ray` several in actors; the trainer cannot tell which."""
