"""Formats of record files, found by suffix or by configuration.

    reader = open_format("a.jsonl.gz")          # or FORMATS.get("fortune:Fortune")(...)
    for record in reader.records("a.jsonl.gz"): ...

A format is a subclass of `Format`. Those of users need no entry: a configuration maps a suffix to "module:attribute".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from whorl.data.files import format_suffix
from whorl.data.formats.format import DAMAGE, DEFAULT_FIELD, LONGEST_RECORD, Block, Format, Record
from whorl.data.quarantine import BadRecordError
from whorl.errors import DataError
from whorl.registry import Registry

FORMATS = Registry(
    "format",
    {
        "text": "whorl.data.formats.text:TextFile",
        "jsonl": "whorl.data.formats.jsonl:JSONL",
        "parquet": "whorl.data.formats.parquet:Parquet",
        "arrow": "whorl.data.formats.parquet:Arrow",
        "tar": "whorl.data.formats.tar:Tar",
        "image_folder": "whorl.data.formats.image_folder:ImageFolder",
        "warc": "whorl.data.formats.warc:WARC",
        "warc_all": "whorl.data.formats.warc:AllWARC",
        "html": "whorl.data.formats.web:HTML",
        "html_all": "whorl.data.formats.web:AllHTML",
        "pdf": "whorl.data.formats.web:PDF",
        "docx": "whorl.data.formats.web:Docx",
        "epub": "whorl.data.formats.web:Epub",
        "csv": "whorl.data.formats.table:CSV",
        "tsv": "whorl.data.formats.table:TSV",
        "notebook": "whorl.data.formats.notebook:Notebook",
        "wikipedia": "whorl.data.formats.wikipedia:Wikipedia",
        "stackexchange": "whorl.data.formats.stackexchange:StackExchange",
        "gutenberg": "whorl.data.formats.gutenberg:Gutenberg",
    },
)
SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".tar": "tar",
    ".warc": "warc", ".wet": "warc", ".csv": "csv", ".tsv": "tsv", ".ipynb": "notebook", ".docx": "docx", ".epub": "epub",
    ".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf",
}  # fmt: skip

__all__ = [
    "FORMATS", "SUFFIXES", "Block", "Format", "Record", "format_name", "open_format", "read_strings", "table_formats",
]  # fmt: skip


def format_name(uri: str, formats: Mapping[str, str] | None = None) -> str:
    """Return the format of a file by its suffix: that of `formats` (suffix -> name), else of `SUFFIXES`, else "text"."""
    return {**SUFFIXES, **(formats or {})}.get(format_suffix(uri), "text")


def open_format(
    uri: str, formats: Mapping[str, str] | None = None, *, fields: Sequence[str] = (), longest: int = LONGEST_RECORD
) -> Format:  # fmt: skip
    """Return the reader of a file. Raises ConfigError: its format cannot be imported."""
    reader: Format = FORMATS.get(format_name(uri, formats))(fields=fields, longest=longest)
    return reader


def table_formats(uri: str, formats: Mapping[str, str], text_field: str) -> Mapping[str, str]:
    """Return `formats`, in which a table without the default field of texts is a text."""
    if format_name(uri, formats) not in ("csv", "tsv") or text_field != DEFAULT_FIELD:
        return formats
    reader: Any = open_format(uri, formats)
    with suppress(BadRecordError, *DAMAGE):  # the reader of texts rejects it
        if DEFAULT_FIELD in reader.columns(uri):
            return formats
    return {**formats, format_suffix(uri): "text"}


def read_strings(uri: str, field: str, label: str) -> Iterator[tuple[int, str]]:
    """Yield number and string of a field for each record of a file in which every record must have one.

    Args:
        label: kind of the file, for errors, such as "test set".

    Raises:
        DataError: the file is missing, or a record is damaged or has no string in this field.
    """
    for record in open_format(uri, fields=[field]).records(uri):
        value = record.value
        if isinstance(value, BadRecordError):
            missing = value.reason == "unreadable"
            raise DataError(
                f"the {label} {uri}{'' if missing else f', record {record.number},'} cannot be read: {value.detail}",
                expected="a file of records, such as JSONL or Parquet",
                do="check the path" if missing else "correct or remove the record",
            )
        if not isinstance(value.get(field), str):
            raise DataError(
                f"the {label} {uri}, record {record.number}, has no text in the field {field!r}",
                expected="a record with a string in that field",
                do=f"name the right field, such as {', '.join(list(value)[:10])}"
                if value
                else "remove the record",
            )
        yield record.number, value[field]
