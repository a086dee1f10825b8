"""Refusal detection."""

from __future__ import annotations

import re

_REFUSAL = re.compile(
    r"\b(?:I(?:'m| am) sorry|I (?:can(?:not|'t)|won't|am unable|am not able)|as an AI\b)", re.IGNORECASE
)


def is_refusal(text: str) -> bool:
    """Return whether the text declines the request."""
    return _REFUSAL.search(text[:400].replace("\u2019", "'")) is not None
