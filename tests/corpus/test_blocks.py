"""Blocks: every record is read once at any block size; unreadable records are counted with a reason."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whorl.corpus.blocks import RawFiles
from whorl.data.quarantine import Quarantine
from whorl.errors import ConfigError, DataError


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    return str(path)


def write_parquet(path: Path, texts: list[str]) -> str:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
    return str(path)


def write_tar(path: Path, texts: list[str]) -> str:
    with tarfile.open(path, "w") as archive:
        for n, text in enumerate(texts):
            suffix, content = ("txt", text) if n % 2 else ("json", json.dumps({"text": text}))
            data, info = content.encode(), tarfile.TarInfo(f"{n:04}.{suffix}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def read_all(files: RawFiles) -> tuple[list[str], Quarantine]:
    rejects = Quarantine()
    return [t for b in range(len(files.blocks)) for t in files.texts(b, rejects)], rejects


@pytest.mark.parametrize("write", [write_parquet, write_tar, write_jsonl])
def test_blocks_cover_every_format_and_are_order_free(tmp_path: Path, write: Any) -> None:
    suffix = write.__name__.removeprefix("write_")
    texts = [f"text number {n} " * (n % 7 + 1) for n in range(50)]
    names = [write(tmp_path / f"{part}.{suffix}", texts[part::2]) for part in (0, 1)]
    files = RawFiles(names, block_bytes=900)
    found, rejects = read_all(files)
    assert sorted(found) == sorted(texts) and not len(rejects) and len(files.blocks) >= 4
    reordered = RawFiles(names[::-1], block_bytes=900)
    assert reordered.fingerprint == files.fingerprint and read_all(reordered)[0] == found


def test_unreadable_records_are_counted_with_reason(tmp_path: Path) -> None:
    path, good = tmp_path / "a.jsonl", b'{"text": "good"}'
    bad = [b"{broken", b'{"other": 1}', b"[1]", b'{"text": 5}', b"\xff\xfe"]
    bad += [b'{"text": "%s"}' % (b"x" * 3_000_000)]
    path.write_bytes(b"\n".join([good, bad[0], good, *bad[1:], good]))
    found, rejects = read_all(RawFiles([str(path)], block_bytes=64))
    assert found == ["good"] * 3 and len(rejects) == 6 and "a.jsonl" in str(rejects.rejected[0])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no files"), (["a.log"], r"a\.log has no supported suffix"),
        (["missing.jsonl"], r"missing\.jsonl cannot be read"),
        (["cut.parquet"], r"cut\.parquet cannot be read"), (["empty.jsonl"], "contain no records"),
    ],
)  # fmt: skip
def test_raw_files_rejects(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises((ConfigError, DataError), match=message):
        RawFiles([str(tmp_path / name) for name in names])
