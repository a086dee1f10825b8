"""The forms of records of each kind of data: the fields that a record needs. `docs/data.md` has an example of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from whorl.data.quarantine import BadRecordError
from whorl.errors import DOCS_URL

Form = tuple[str, ...]
FORMS: dict[str, tuple[Form, ...]] = {
    "conversations": (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion")),
    "pairs": (("prompt", "completion"),),
    "tasks": (("prompt", "verifier"), ("messages", "verifier")),
    "preferences": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "unpaired": (("prompt", "completion", "label"),),
    "texts": (("text",),),
    "labelled": (("text", "label"),),
    "images": (("image", "label"), ("image", "caption")),
}
EXPECTED = f"records in a form of {DOCS_URL}/data.md"
ADDED = ("id", "source")  # to every record by its reader


def unknown_form(record: Mapping[str, Any], kind: str, forms: Sequence[Form] = ()) -> BadRecordError:
    """Return the error of a record that lacks fields of each form; it names the nearest one.

    Args:
        forms: those of the kind with the names of the user's fields; default `FORMS[kind]`.
    """
    names = [str(name)[:40] for name, value in record.items() if value is not None and name not in ADDED]
    fields = f"fields: {', '.join(names[:10]) or 'none'}"

    def common(form: Form) -> float:
        return sum(1.0 if name in names else 0.5 * bool(_similar(name, names)) for name in form)

    forms = forms or FORMS[kind]
    nearest = max(forms, key=lambda form: (common(form), -len(form)))
    if not common(nearest):
        detail = f"{fields}; expected {'; '.join(map(_joined, forms))}"
    else:
        lacking = [f"{name}{_similar(name, names)}" for name in nearest if name not in names]
        detail = f"{fields}; nearest form: {_joined(nearest)}, without {_joined(lacking)}"
    others = (k for k, kinds in FORMS.items() if k != kind and any(set(names) >= set(form) for form in kinds))
    if other := next(others, None):
        detail += f"; these are fields of {other}"
    return BadRecordError("unknown_shape", "", f"{detail}; all forms: {DOCS_URL}/data.md")


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _similar(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 1, 0.75)
    return f" (is it {near[0]!r}?)" if near and near[0] != name else ""
