"""A verifier that kills the worker that calls it, once it is armed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def verify(task: object, completion: str) -> float:
    """Return 1 if the completion starts with a digit.

    The first call that finds a file "armed" kills and never returns.
    """
    place = Path(os.environ["WHORL_TEST_STRIKES"])
    try:
        (place / "armed").rename(place / "struck")
    except FileNotFoundError:
        return float(completion[:1].isdigit())
    (place / "struck").write_text(str(os.getpid()))
    next(p for p in psutil.Process().parents() if p.name().startswith("producer")).kill()
    time.sleep(600)
    return 0.0
