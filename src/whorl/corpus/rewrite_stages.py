"""The functions of the units of `rewrite`: each reads one document file and writes one, row by row and group by group.

Lines are removed by the rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2). A line stays if it ends with
terminal punctuation, has enough words, and mentions neither Javascript nor a policy of a page. The order of the rules, the
ellipsis, the longest word and the phrases of policies are those of C4's published code. The measure `rules` counts the lines
that stay by default (`c4_lines`). Rules of words and line ends do not apply to lines in scripts without spaces between
words, such as Chinese.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.deduplication.lines import LineConfig, line_hashes
from whorl.corpus.deduplication.shingles import NO_SPACES
from whorl.corpus.deduplication.substrings import without_bytes
from whorl.corpus.measures.personal_data import mask
from whorl.corpus.measures.rules import CITATION, MAX_UNSPACED, MAX_WORD_CHARACTERS, MIN_LINE_WORDS, POLICIES
from whorl.corpus.measures.run import text_batches

if TYPE_CHECKING:
    import pyarrow as pa

TERMINAL = (".", "?", "!", '"', "'")


class C4LineConfig(BaseModel):
    """Which lines go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    terminal_punctuation: bool = Field(
        default=True,
        description="remove lines that do not end with one of . ? ! \" ' or that end with an ellipsis",
    )
    min_words: int = Field(
        default=MIN_LINE_WORDS, ge=1, description="remove lines with fewer words, blank ones too"
    )
    max_word_characters: int = Field(
        default=MAX_WORD_CHARACTERS, ge=1, description="remove lines with a longer word"
    )
    javascript: bool = Field(default=True, description='remove lines with the word "javascript"')
    policies: bool = Field(
        default=True, description="remove lines with a phrase such as 'terms of use' or 'use cookies'"
    )


def bad_line(line: str, config: C4LineConfig) -> str:
    """Return the name of the first rule by which a line goes, or "". Marks such as [1] at its end do not count."""
    words = line.split()
    if not words:
        return "blank"
    stripped = line.strip()
    plain = CITATION.sub("", stripped)
    if len(NO_SPACES.findall(stripped)) <= MAX_UNSPACED * len(stripped):
        if max(map(len, words)) > config.max_word_characters:
            return "long_word"
        if config.terminal_punctuation and (not plain.endswith(TERMINAL) or plain.endswith("...")):
            return "no_terminal_punctuation"
        if len(words) < config.min_words:
            return "few_words"
    lower = plain.lower()
    if config.javascript and "javascript" in lower:
        return "javascript"
    if config.policies and any(phrase in lower for phrase in POLICIES):
        return "policy"
    return ""


def without_bad_lines(text: str, config: C4LineConfig) -> tuple[str, dict[str, list[str]]]:
    """Return the text without the lines that go, and these lines with their line ends: rule -> lines.

    Lines are those of `str.splitlines`. The others do not change.
    """
    kept, gone = list[str](), dict[str, list[str]]()
    for line in text.splitlines(keepends=True):
        rule = bad_line(line, config)
        (gone.setdefault(rule, []) if rule else kept).append(line)
    return "".join(kept), gone


DOCUMENTS, EDITS, HASHES, FIRST = "documents.parquet", "edits.parquet", "hashes.npy", "first.npy"
Edit = tuple[str, str, int, int, str | None]  # the columns of `edit_schema`


def edit_schema() -> pa.Schema:
    """Return the columns of `edits-*.parquet`. bytes: of UTF-8 that went; matched_id: where the first of them stays."""
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()), ("kind", pa.string()), ("count", pa.int64()), ("bytes", pa.int64()),
            ("matched_id", pa.string()),
        ]
    )  # fmt: skip


def mask_documents(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the documents of a file with personal data masked."""

    def change(row: int, name: str, text: str) -> tuple[str, Iterable[Edit]]:
        masked, counts = mask(text)
        lost = _size(text) - _size(masked)
        found = [(kind, n) for kind, n in counts.items() if n]
        return masked, [(name, kind, n, lost if i == 0 else 0, None) for i, (kind, n) in enumerate(found)]

    return _rewrite_file(Path(inputs[0]), out, change)


def drop_c4_lines(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the documents of a file without the lines that C4's rules remove."""
    settings = C4LineConfig(**config)

    def change(row: int, name: str, text: str) -> tuple[str, Iterable[Edit]]:
        changed, gone = without_bad_lines(text, settings)
        edits = [(name, f"c4_{rule}", len(some), _size("".join(some)), None) for rule, some in gone.items()]
        return changed, edits

    return _rewrite_file(Path(inputs[0]), out, change)


def hash_lines(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the hash of each line of a document file, and the first line of each document [n + 1]."""
    import pyarrow.parquet as pq

    settings = LineConfig(**config)
    hashes, firsts, n_lines = [np.zeros(0, np.uint64)], [np.zeros(1, np.int64)], 0
    with pq.ParquetFile(inputs[0]) as file:
        for group in range(file.num_row_groups):
            for texts in text_batches(file.read_row_group(group, columns=["text"])["text"].to_pylist()):
                some, first = line_hashes(texts, settings)
                hashes.append(some)
                firsts.append(first[1:] + n_lines)
                n_lines += len(some)
    np.save(out / HASHES, np.concatenate(hashes))
    np.save(out / FIRST, np.concatenate(firsts))
    return {"lines": n_lines}


def cut_documents(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the documents of a file without the lines, or the spans of bytes, that a plan names."""
    import pyarrow.parquet as pq

    documents, plan = inputs
    table = pq.read_table(plan)
    rows, starts, ends = (table[name].to_numpy() for name in ("row", "start", "end"))
    matched, kind = table["matched_id"].to_pylist(), config["kind"]
    cut = without_lines if kind == "line" else without_bytes

    def change(row: int, name: str, text: str) -> tuple[str, Iterable[Edit]]:
        low, high = np.searchsorted(rows, [row, row + 1])
        if low == high:
            return text, ()
        changed = cut(text, starts[low:high].tolist(), ends[low:high].tolist())
        return changed, [(name, kind, int(high - low), _size(text) - _size(changed), matched[low] or None)]

    return _rewrite_file(Path(documents), out, change)


def _rewrite_file(
    path: Path, out: Path, change: Callable[[int, str, str], tuple[str, Iterable[Edit]]]
) -> dict[str, Any]:
    """Write the file with the texts that `change(row, id, text)` returns, and the edits; return counts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    edits, n_bytes, row = list[Edit](), 0, 0
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        with pq.ParquetWriter(
            out / DOCUMENTS, schema, compression="zstd", use_dictionary=["source", "licence", "language"]
        ) as writer:
            for group in range(file.num_row_groups):
                table, texts = file.read_row_group(group), list[str]()
                for name, text in zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True):
                    changed, made = change(row, name, text)
                    edits += made
                    texts.append(changed)
                    n_bytes += _size(changed)
                    row += 1
                column = schema.get_field_index("text")
                texts_of = pa.array(texts, pa.string())
                writer.write_table(
                    table.set_column(column, schema.field(column), texts_of), max(len(texts), 1)
                )
    columns = zip(*edits, strict=True) if edits else [[] for _ in edit_schema()]
    arrays = [
        pa.array(list(values), field.type) for values, field in zip(columns, edit_schema(), strict=True)
    ]
    pq.write_table(pa.table(arrays, schema=edit_schema()), out / EDITS)
    counts: dict[str, dict[str, int]] = {}
    for _, kind, count, size, _ in edits:
        total = counts.setdefault(kind, {"documents": 0, "count": 0, "bytes": 0})
        total["documents"] += 1
        total["count"] += count
        total["bytes"] += size
    return {"documents": row, "bytes": n_bytes, "edits": dict(sorted(counts.items()))}


def without_lines(text: str, starts: Sequence[int], ends: Sequence[int]) -> str:
    """Return a text without the lines starts[i] to ends[i] - 1."""
    gone = {line for start, end in zip(starts, ends, strict=True) for line in range(start, end)}
    return "\n".join(line for number, line in enumerate(text.split("\n")) if number not in gone)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
