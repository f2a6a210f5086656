"""The `vllm` engine: vLLM in this process. The package vllm is imported when an engine is made, never before."""
