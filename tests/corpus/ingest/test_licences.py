"""Licences of repositories: recognised, nearest folder, and part of the address."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from whorl.corpus import IngestConfig, document_files, fingerprint, ingest
from whorl.corpus.provenance.licences import recognise
from whorl.tracking.progress import Progress

ROOT = Path(__file__).resolve().parents[3]
MIT = """Copyright (c) 2020 A. Author

Permission is hereby granted, free of charge, to any person obtaining a copy of this software ...
The above copyright notice and this permission notice shall be included in all copies ...
"""
BSD = "Redistribution and use in source and binary forms, with or without modification, are permitted"
GPL = "GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MIT, "MIT"), (BSD, "BSD-2-Clause"), (BSD + " ... Neither the name of", "BSD-3-Clause"), (GPL, "GPL-3.0-only"),
        ("GNU AFFERO GENERAL PUBLIC LICENSE Version 3 ... GNU General Public License", "AGPL-3.0-only"),
        ("GNU LESSER GENERAL PUBLIC LICENSE Version 2.1, February 1999", "LGPL-2.1-only"),
        ("Apache License\n Version 2.0, January 2004", "Apache-2.0"), ("# SPDX-License-Identifier: ISC\n", "ISC"),
        ("All rights reserved.", None), ("", None),
    ],
)  # fmt: skip
def test_licence_of_known_texts(text: str, expected: str | None) -> None:
    assert recognise(text) == expected


def licences(folder: Path, **options: object) -> dict[str, str | None]:
    out = folder.parent / f"out{len(list(folder.parent.iterdir()))}"
    out.mkdir()
    ingest(IngestConfig(sources=[str(folder)], **options), out, Progress.silent())  # type: ignore[arg-type]
    rows = [r for p in document_files(out) for r in pq.read_table(p, columns=["path", "licence"]).to_pylist()]
    return {r["path"]: r["licence"] for r in rows}


def test_nearest_licence_file_counts(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    files = {
        "LICENSE": MIT, "a.py": "print(1)", "src/b.py": "print(2)", "vendor/COPYING": GPL, "vendor/x/c.py": "print(3)",
        "vendor/x/own.py": "# SPDX-License-Identifier: ISC\nprint(4)", "dual/LICENSE-MIT": MIT,
        "dual/LICENSE-APACHE": "Apache License Version 2.0", "dual/d.py": "print(5)",
    }  # fmt: skip
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    found = licences(repository, include=["*.py"])
    assert found == {
        "a.py": "MIT", "src/b.py": "MIT", "vendor/x/c.py": "GPL-3.0-only", "vendor/x/own.py": "ISC",
        "dual/d.py": "Apache-2.0 OR MIT",
    }  # fmt: skip
    given = licences(repository, include=["a.py"], licences={str(repository): "CC0-1.0"})
    assert given == {"a.py": "CC0-1.0"}
    config = IngestConfig(sources=[str(repository)], include=["*.py"])
    before = fingerprint(config)
    (repository / "LICENSE").write_text(GPL)
    assert fingerprint(config) != before
    (repository / "LICENSE").write_bytes(b"\xff\0 no licence")
    assert licences(repository, include=["a.py"]) == {"a.py": None}
