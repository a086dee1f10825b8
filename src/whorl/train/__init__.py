"""Training: learner, optimizers, language-model pretraining, checkpoints, metrics, resilience, profiling.

The names below are imported at their first use, so that `train.config` can be read without torch. `whorl.train` is also a
function (`whorl.api.train`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from whorl._callable_module import CallableModule
from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.train.config import OptimConfig, ScheduleConfig, TrainConfig
    from whorl.train.learner.average import Average
    from whorl.train.learner.learner import Learner
    from whorl.train.learner.loop import StopTraining, train_loop
    from whorl.train.learner.update import DivergedError, ParamOptim, Update, all_adamw
    from whorl.train.optim.clipping import clip_grad_norm_
    from whorl.train.optim.lr_schedule import lr_scale
    from whorl.train.optim.optimizer import Optimizer, OptimizerInputs
    from whorl.train.optim.optimizers import AdamW, Muon
    from whorl.train.optim.soap import SOAP
    from whorl.train.optim.torch_optimizer import TorchOptimizer

_MODULES = {
    "config": ("OptimConfig", "ScheduleConfig", "TrainConfig"),
    "learner.average": ("Average",),
    "learner.learner": ("Learner",),
    "learner.loop": ("StopTraining", "train_loop"),
    "learner.update": ("DivergedError", "ParamOptim", "Update", "all_adamw"),
    "optim.clipping": ("clip_grad_norm_",),
    "optim.lr_schedule": ("lr_scale",),
    "optim.optimizer": ("Optimizer", "OptimizerInputs"),
    "optim.optimizers": ("AdamW", "Muon"),
    "optim.soap": ("SOAP",),
    "optim.torch_optimizer": ("TorchOptimizer",),
}
__all__ = [
    "SOAP",
    "AdamW",
    "Average",
    "DivergedError",
    "Learner",
    "Muon",
    "OptimConfig",
    "Optimizer",
    "OptimizerInputs",
    "ParamOptim",
    "ScheduleConfig",
    "StopTraining",
    "TorchOptimizer",
    "TrainConfig",
    "Update",
    "all_adamw",
    "clip_grad_norm_",
    "lr_scale",
    "train_loop",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)

sys.modules[__name__].__class__ = CallableModule  # whorl.train(...) calls whorl.api.train
