"""The planner: choose model size, vocabulary and training steps for a budget of time or FLOPs.

`planner` chooses with `laws.law` (expected loss of a shape), `accounting` (parameters, FLOPs, memory) and timed
training steps. Import from the modules: this file is empty, so that recipe settings (`config`) load without torch.
"""
