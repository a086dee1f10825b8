"""Labelled texts from files of records, and the held-out part of labelled rows.

The subtle point is the held-out part. Copies of one text or image in both parts would measure memorization, so equal
contents are assigned together, also where their labels differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.data.forms import unknown_form
from whorl.data.quarantine import Quarantine
from whorl.data.record_fields import has_field, label_field, text_field
from whorl.data.record_files import converted_records
from whorl.errors import DataError
from whorl.tracking.seeds import numpy_rng


def read_labelled(path: Path, text: str, label: str, quarantine: Quarantine) -> list[tuple[str, str]]:
    """Return (text, label) of each good record in order; the others go to the quarantine.

    Args:
        text, label: names of the fields. A label is a text or a whole number.

    Raises:
        DataError: no good record, or one class only.
    """

    def shape(record: Mapping[str, Any]) -> tuple[str, str]:
        if not (has_field(record, text) and has_field(record, label)):
            raise unknown_form(record, "labelled", [(text, label)])
        return text_field(record, text), label_field(record, label)

    expected = f"records with a text in {text!r} and a class in {label!r}"
    found = list(converted_records(path, quarantine, "train", shape, expected))
    if len({name for _, name in found}) < 2:
        raise DataError(
            f"{path} has texts of one class only: {found[0][1]}", expected="at least two classes",
            do=f"add records with another value of {label!r}",
        )  # fmt: skip
    return found


def held_out(
    labels: Sequence[str], contents: Sequence[bytes], fraction: float, seed: int, name: str
) -> NDArray[np.bool_]:
    """Return whether each row is held out [N]: `fraction` of each class, copies together, one at least stays.

    Args:
        contents: N rows as bytes. name: of the random stream.
    """
    keys = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
    of_class: dict[str, dict[bytes, None]] = {}
    for label, key in zip(labels, keys, strict=True):
        of_class.setdefault(label, {})[key] = None
    split: dict[bytes, bool] = {}
    for label, unique in sorted(of_class.items()):
        order = [*unique]
        n_test = min(len(order) - 1, max(1, round(len(order) * fraction)))
        rng = numpy_rng(seed, name, "split", label)
        chosen = set(rng.permutation(len(order))[:n_test].tolist())
        for i, key in enumerate(order):
            split.setdefault(key, i in chosen)
    for unique in of_class.values():
        if all(split[key] for key in unique):  # by copies in other classes
            split[next(iter(unique))] = False
    return np.array([split[key] for key in keys])
