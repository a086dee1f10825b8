"""Text embedders: contrastive training and inference."""
