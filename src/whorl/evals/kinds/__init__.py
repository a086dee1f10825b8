"""Kinds of tasks: each makes requests of an item, and scores the responses. One file and one entry each."""

from whorl.registry import Registry

KINDS = Registry(
    "kind of task",
    {
        "likelihood": "whorl.evals.kinds.likelihood:TextLikelihood",
        "exposure": "whorl.evals.kinds.exposure:Exposure",
        "choice": "whorl.evals.kinds.choice:Choice",
        "generate": "whorl.evals.kinds.generate:Generate",
        "program": "whorl.evals.kinds.generate:ProgramTests",
        "constraints": "whorl.evals.kinds.generate:Constraints",
        "judge": "whorl.evals.kinds.judge:Judge",
        "episodes": "whorl.evals.kinds.episodes:Episodes",
        "agent": "whorl.evals.kinds.agent:Agent",
    },
)

__all__ = ["KINDS"]
