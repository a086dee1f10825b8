"""The model's step on a CPU in one call of a library that is compiled where it runs (`step.py`, `build.py`)."""

from whorl.engine.native.step import NativeStep, unsupported_reason

__all__ = ["NativeStep", "unsupported_reason"]
