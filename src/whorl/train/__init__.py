"""Training: `learner` and its optimisers (`optim`) and replicas (`world`), the loop (`pretrain`), checkpoints, timing.

Import from the modules; this file stays empty so that a recipe's settings (`config`) can be read without torch.
"""
