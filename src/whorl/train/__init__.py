"""Training: `learner` and its optimisers (`optim`) and replicas (`world`), the loop (`pretrain`), checkpoints, timing.

Import from the modules; this file stays empty so that a recipe's settings (`config`) can be read without torch.
"""

import sys

from whorl._callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule  # whorl.train(...) calls whorl.api.train
