"""GGUF files: reading, configuration, tokenizer."""
