"""Collectives and layouts, each on one page, on any `torch.nn.Module`. They explain; the trainer does not use them."""
