"""Export to GGUF: file, architecture and vocabulary."""
