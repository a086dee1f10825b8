"""Training: learner, optimizers, language-model pretraining, checkpoints, metrics, resilience, profiling.

Import from the modules. This file stays empty so that `train.config` can be read without importing torch.
"""

import sys

from whorl._callable_module import CallableModule

sys.modules[__name__].__class__ = CallableModule  # whorl.train(...) calls whorl.api.train
