"""Training: the learner, its optimisers and replicas, the loop, checkpoints."""

from whorl.train.learner import Learner, OptimConfig, Shared
from whorl.train.pretrain import Job, Observer, pretrain
from whorl.train.schedule import warmup_stable_decay

__all__ = ["Job", "Learner", "Observer", "OptimConfig", "Shared", "pretrain", "warmup_stable_decay"]
