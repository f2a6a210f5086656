"""Settings: typed sections that hold the only defaults, and strict loading. Never imports torch."""
