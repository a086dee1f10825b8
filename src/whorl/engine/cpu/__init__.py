"""The model step on a CPU as one call of a C++ library, compiled on the machine (`step.py`, `build.py`)."""

from whorl.engine.cpu.step import NativeStep, unsupported_reason

__all__ = ["NativeStep", "unsupported_reason"]
