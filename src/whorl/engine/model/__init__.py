"""The model side of the engine: batch assembly, forward passes, LoRA adapters."""
