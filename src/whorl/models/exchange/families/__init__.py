"""Model families whose weights are exchanged with Hugging Face, one file per group."""
