"""A folder of images, one subfolder per class: FOLDER/CLASS/FILE; local, or any fsspec URL.

    {"file": "cats/1.png", "image": b"...", "label": "cats"}

Images of a folder without subfolders have no label.
Files are in the order of their names, at any depth below the class folder. Names that begin with a dot are left out. The
bytes are not decoded here (`data/images.py`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whorl.data.files import filesystem, is_url, open_file
from whorl.data.formats.format import Block, Format, Record
from whorl.data.quarantine import BadRecordError
from whorl.errors import DataError


class ImageFolder(Format):
    """See the top of this file. The unit of blocks is a file."""

    def blocks(self, uri: str, block_bytes: int) -> Iterator[Block]:
        n = len(list_files(uri))
        yield Block(0, n, n)

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        """Yield one record per file. Raises DataError: a class folder is empty."""
        files = list_files(uri)
        has_classes = any("/" in name for name, _ in files)
        for index, (name, address) in enumerate(files[start:stop], start):
            value: dict[str, Any] | BadRecordError
            with open_file(address) as stream:
                data = stream.read(self.longest + 1)
            if has_classes and "/" not in name:
                value = BadRecordError("bad_field", "label", f"{name} is in no class folder")
            elif len(data) > self.longest:
                value = BadRecordError("too_large", "", f"{name} has more than {self.longest} bytes")
            else:
                value = {"file": name, "image": data}
                if has_classes:
                    value["label"] = name.split("/")[0]
            yield Record(index - start + 1, index, len(data), value, index + 1)


def list_files(uri: str) -> list[tuple[str, str]]:
    """Return (path below the folder, address) of every file, sorted.

    Raises:
        DataError: there is no such folder, or one of its subfolders has no files.
    """
    if is_url(uri):
        system, root = filesystem(uri)
        paths = system.find(root)
        found = {posixpath.relpath(path, root): system.unstrip_protocol(path) for path in paths}
        folders = set[str]()
    else:
        base = Path(uri).expanduser()
        if not base.is_dir():
            raise DataError(f"{uri} is no folder", expected="a folder with one folder of images per class")
        found = {path.relative_to(base).as_posix(): str(path) for path in base.rglob("*") if path.is_file()}
        folders = {path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")}
    kept = {n: address for n, address in found.items() if not any(p.startswith(".") for p in n.split("/"))}
    for folder in sorted(folders - {name.split("/")[0] for name in kept if "/" in name}):
        raise DataError(
            f"the class folder {posixpath.join(uri, folder)} is empty",
            expected="at least one image in the folder of each class",
            do="add images of this class, or remove the folder",
        )
    return sorted(kept.items())
