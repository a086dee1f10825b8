"""Every golden case: importing this module registers them all in `CASES`."""

from __future__ import annotations

import cases_agents
import cases_align
import cases_engine
import cases_generative
import cases_pretrain
import cases_surface
from golden_case import CASES, Result

__all__ = [
    "CASES", "Result", "cases_agents", "cases_align", "cases_engine", "cases_generative", "cases_pretrain",
    "cases_surface",
]  # fmt: skip
