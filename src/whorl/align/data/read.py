"""Readers of alignment data: files in, types of `formats` out; bad records go to the quarantine.

    preferences(path, quarantine)   -> an iterator of Preference; likewise conversations, pairs, unpaired

`path` is a file or a folder of `whorl.data.record_files`. A file without a single good record raises: the path or the field
names are probably wrong. Tasks are read by `whorl.evals.grading.read`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from whorl.align.data import formats
from whorl.align.data.formats import Conversation, Preference, PromptCompletion, UnpairedPreference
from whorl.data.forms import EXPECTED
from whorl.data.quarantine import Quarantine
from whorl.data.record_files import converted_records


def conversations(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[Conversation]:
    """Yield conversations in order; `split` selects among several in a folder. Raises DataError: no record is good."""
    return converted_records(path, quarantine, split, formats.to_conversation, EXPECTED)


def pairs(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[PromptCompletion]:
    """Yield prompt-completion pairs; otherwise as `conversations`."""
    return converted_records(path, quarantine, split, formats.to_prompt_completion, EXPECTED)


def preferences(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[Preference]:
    """Yield preference pairs; otherwise as `conversations`."""
    return converted_records(path, quarantine, split, formats.to_preference, EXPECTED)


def unpaired(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[UnpairedPreference]:
    """Yield labelled completions; otherwise as `conversations`."""
    return converted_records(path, quarantine, split, formats.to_unpaired_preference, EXPECTED)
