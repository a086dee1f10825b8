"""Objectives and estimators: pure functions of tensors that return a summed loss, its count and metrics.

Import from the modules; this file stays empty so that `catalog` can be read without torch.
"""
