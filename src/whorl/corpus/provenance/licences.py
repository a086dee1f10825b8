"""Licences of source repositories: the SPDX identifier of the licence file that is nearest above a file.

A text is recognised by phrases that its licence has and others have not. Of a GNU licence the "only" form is returned, since
a grant of later versions is in the files, not in the licence. An unknown text gives none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = re.compile(r"(?:licen[sc]e|copying|unlicense)(?:[-._].*)?", re.IGNORECASE)
READ_BYTES = 1 << 16
TITLE = 400  # characters in which a licence has its title
SPDX = re.compile(r"SPDX-License-Identifier:\s*([A-Za-z0-9.+\-() ]{2,80})")
# Identifier -> phrases, all of which occur: in the title, and anywhere. The first that fits counts.
TEXTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Apache-2.0": (("apache license", "version 2.0"), ()),
    "AGPL-3.0-only": (("gnu affero general public license", "version 3"), ()),
    "LGPL-3.0-only": (("gnu lesser general public license", "version 3"), ()),
    "LGPL-2.1-only": (("gnu lesser general public license", "version 2.1"), ()),
    "GPL-3.0-only": (("gnu general public license", "version 3"), ()),
    "GPL-2.0-only": (("gnu general public license", "version 2"), ()),
    "MPL-2.0": (("mozilla public license", "2.0"), ()),
    "CC0-1.0": (("cc0 1.0 universal",), ()),
    "CC-BY-SA-4.0": (("attribution-sharealike 4.0",), ()),
    "CC-BY-4.0": (("attribution 4.0 international",), ()),
    "PSF-2.0": ((), ("python software foundation license version 2",)),
    "Unlicense": ((), ("free and unencumbered software released into the public domain",)),
    "BSD-3-Clause": ((), ("redistribution and use in source and binary forms", "neither the name")),
    "BSD-2-Clause": ((), ("redistribution and use in source and binary forms",)),
    "MIT": ((), ("permission is hereby granted, free of charge", "the above copyright notice and this permission")),
    "ISC": ((), ("permission to use, copy, modify, and", "distribute this software for any purpose")),
}  # fmt: skip


def recognise(text: str) -> str | None:
    """Return the SPDX identifier of a licence's text, or None."""
    if found := SPDX.search(text):
        return found[1].strip()
    words = " ".join(text.lower().split())
    for name, (title, anywhere) in TEXTS.items():
        if all(p in words[:TITLE] for p in title) and all(p in words for p in anywhere):
            return name
    return None


def folder_licences(files: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return the licence of each folder that has a licence file: relative path ("" for the root) -> SPDX identifier.

    Several of them (LICENSE-MIT and LICENSE-APACHE) are a choice: "Apache-2.0 OR MIT". COPYING.LESSER goes before COPYING.

    Args:
        files: relative path and place of each file of a source.
    """
    found: dict[str, dict[str, str]] = {}
    for path, place in files:
        folder, _, name = path.rpartition("/")
        if FILE.fullmatch(name) and place.is_file():
            try:
                with place.open("rb") as stream:
                    licence = recognise(stream.read(READ_BYTES).decode("utf-8", "replace"))
            except OSError:
                continue
            if licence is not None:
                found.setdefault(folder, {})[name.lower()] = licence
    out = {}
    for folder, names in found.items():
        lesser = names.get("copying.lesser")
        out[folder] = lesser or " OR ".join(sorted(set(names.values())))
    return out


def nearest_licence(path: str, licences: Mapping[str, str]) -> str | None:
    """Return the licence of the nearest folder above a file that has one."""
    folder = path
    while folder:
        folder = folder.rpartition("/")[0]
        if folder in licences:
            return licences[folder]
    return None
