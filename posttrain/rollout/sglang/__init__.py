"""The `sglang` engine: SGLang in a process beside this one. The package sglang is imported when an engine is made."""
