"""The budget dial: how big, how long and on what, for the time or arithmetic that one is willing to spend.

`planner` chooses, by `law` (what a shape is expected to reach), `cost` (what it takes) and real steps timed on the spot.
Import from the modules; this file stays empty so that a recipe's settings (`config`) can be read without torch.
"""
