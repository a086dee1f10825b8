"""Collectives and layouts, each on one page, on any `torch.nn.Module`. The trainer uses torch's own; these explain them."""
