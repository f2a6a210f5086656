"""Models: loading by folder or hub id, packed forward passes, value heads, LoRA, and the small embedded model."""
