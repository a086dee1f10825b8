"""Compute what a model or a run costs before it starts: parameters, memory, FLOPs, time, and which layout fits.

    whorl plan show llama-3-8b --device h100

    whorl plan fit llama-3-8b --device h100x8

    whorl plan law runs.csv --flops 1e24

    whorl plan study quickstart --budget 30m

    whorl plan audit

MODEL is a published model (`gpt2`, `llama-3-8b`), a folder or file with a config.json, an artifact of the store, a recipe,
or a shape (layers x width / vocabulary, as 6x384/8192). Nothing is downloaded, and no weight is read or made.
"""

from whorl.cli.plan.audit import audit
from whorl.cli.plan.fit import fit
from whorl.cli.plan.law import law
from whorl.cli.plan.show import show
from whorl.cli.plan.study import study

__all__ = ["audit", "fit", "law", "show", "study"]
