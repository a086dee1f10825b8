"""Attributes: properties of a document, one column each, in files that are row-aligned with the documents.

An attribute never drops a document. The selection is a query over the columns, so a threshold can change without
reading the text again. The columns are the document's provenance, those of `measures`, and those that need a pass over
all documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.measures.measure import MeasureConfig
from whorl.corpus.measures.run import check_columns
from whorl.errors import DOCS_URL, ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

# Languages (of `readers.LANGUAGES`) that are not code. A document of unknown language counts as prose.
PROSE_LANGUAGES = {None, "text", "markdown", "restructuredtext", "html", "latex", "csv"}
PROVENANCE = ["source", "path", "language", "licence", "url", "time", "media_type"]
QUERY_BATCH_ROWS, MAX_SHARED = 1 << 16, 1000
HOST = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?([^/?#:]*)")  # of a URL


def attribute_schema(measures: Sequence[MeasureConfig]) -> pa.Schema:
    """Return the columns of `attributes-*.parquet`. Raises ConfigError: a name occurs twice."""
    import pyarrow as pa

    provenance = [
        ("row", pa.int64()),  # index in the corpus, from 0 over all document files in order
        ("source", pa.string()),
        ("path", pa.string()),
        ("language", pa.string()),
        ("is_code", pa.bool_()),  # in prose a line may be a whole paragraph, in code it may not
        ("licence", pa.string()),
        ("url", pa.string()),
        ("domain", pa.string()),  # the host of the URL, in lower case
        ("time", pa.string()),  # as written in the source, mostly ISO 8601
        ("media_type", pa.string()),
    ]
    of_corpus = [
        ("exact_duplicate", pa.bool_()),  # another row with the same text stays (`deduplication/exact.py`)
        ("cluster", pa.int64()),  # row of the first document of its near-duplicate cluster
        ("cluster_documents", pa.int64()),
        ("near_duplicate", pa.bool_()),  # not the first of its cluster
    ]
    check_columns(measures, [name for name, _ in (*provenance, *of_corpus)])
    measured = [field for config in measures for field in config.resolve().schema(config.prefix)]
    return pa.schema([*provenance, *measured, *of_corpus])


def attribute_file_name(documents: Path) -> str:
    """Return the name of a document file's attributes."""
    return documents.name.replace("documents", "attributes", 1)


def write_attributes(
    documents: Sequence[Path], measures: Sequence[MeasureConfig], measured: Mapping[str, Sequence[Path]],
    of_corpus: Mapping[str, NDArray[Any]], out: Path,
) -> None:  # fmt: skip
    """Write `attributes-*.parquet`, one row group at a time.

    Args:
        measured: name of a measure -> its columns' files (`measure_files`).
        of_corpus: column -> value of each document of all files, [n_documents].
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = attribute_schema(measures)
    begin = 0
    for number, path in enumerate(documents):
        parts = [(config, pq.ParquetFile(measured[config.name][number])) for config in measures]
        with (
            pq.ParquetFile(path) as file,
            pq.ParquetWriter(out / attribute_file_name(path), schema, compression="zstd") as writer,
        ):
            for group in range(file.num_row_groups):
                provenance = _provenance(file.read_row_group(group, columns=PROVENANCE))
                end = begin + len(provenance)
                is_code = [language not in PROSE_LANGUAGES for language in provenance["language"].to_pylist()]
                columns = {"row": pa.array(range(begin, end)), "is_code": pa.array(is_code)}
                columns |= {name: provenance[name] for name in provenance.column_names}
                for config, part in parts:
                    table = part.read_row_group(group)
                    columns |= {config.prefix + name: table[name] for name in table.column_names}
                columns |= {name: pa.array(values[begin:end]) for name, values in of_corpus.items()}
                writer.write_table(
                    pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema)
                )
                begin = end
        for _, part in parts:
            part.close()


def _provenance(found: pa.Table) -> pa.Table:
    """Add the domain."""
    import pyarrow as pa

    if found["url"].null_count == len(found):
        return found.append_column("domain", pa.nulls(len(found), pa.string()))
    return found.append_column("domain", pa.array(map(domain_of, found["url"].to_pylist()), pa.string()))


def domain_of(url: str | None) -> str | None:
    """Return the host of a URL in lower case, or None."""
    found = HOST.match(url or "")
    return found[1].lower() or None if found else None


def replace_column(attributes: Sequence[Path], name: str, values: NDArray[Any]) -> None:
    """Replace a column of attribute files by [n_documents] values, in those files where it differs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    end = 0
    for path in attributes:
        old = pq.read_table(path, columns=[name])[name]
        begin, end = end, end + len(old)
        if np.array_equal(old.to_numpy(), values[begin:end]):
            continue
        changed = path.with_name(path.name + ".changed")
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            with pq.ParquetWriter(changed, schema, compression="zstd") as writer:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    column = pa.array(values[begin : begin + len(table)], schema.field(name).type)
                    writer.write_table(
                        table.set_column(schema.get_field_index(name), schema.field(name), column)
                    )
                    begin += len(table)
        changed.replace(path)


def query_attributes(
    query: str,
    column: str,
    attributes: Sequence[Path],
    columns: Sequence[str],
    n_rows: int,
    *,
    step: str = "curate",
    replace: Mapping[str, str] | None = None,
) -> NDArray[Any]:
    """Run a query over the table `attributes` and return a column's text per row, 'not_selected' for rows it leaves out.

    Args:
        columns: of the attributes, for error messages.
        step: whose query it is, for error messages.
        replace: columns that the query sees with another value: name -> SQL expression.

    Raises:
        ConfigError: the query is invalid, or does not return `row` and the column for known rows, each once.
    """
    import duckdb
    import pyarrow.dataset as ds

    # A recipe's SQL may come from an untrusted source, so it can read only the attributes. A registered data set is
    # streamed from its files, so memory does not grow with the number of rows.
    database = duckdb.connect(
        config={
            "threads": 1,
            "memory_limit": "256MB",
            "enable_external_access": False,
            "lock_configuration": True,
        }
    )
    try:
        database.register("measured", ds.dataset([str(path) for path in attributes]))
        others = ", ".join(f"{value} AS {name}" for name, value in (replace or {}).items())
        star = f"* REPLACE ({others})" if others else "*"
        database.execute(f"CREATE TEMP VIEW attributes AS SELECT {star} FROM measured")
        typed = f"coalesce(row::BIGINT, -1) AS row, coalesce(\"{column}\"::VARCHAR, '') AS value"
        result = database.execute(f"SELECT {typed} FROM ({query})")
        out, found = np.full(n_rows, "not_selected", dtype=object), np.zeros(n_rows, bool)
        names, n_found = dict[str, str](), 0
        while batch := result.fetchmany(QUERY_BATCH_ROWS):
            rows = np.array([row for row, _ in batch], np.int64)
            n_found += len(rows)
            if rows.min() < 0 or rows.max() >= n_rows:
                break
            found[rows] = True
            # Equal values share one string.
            out[rows] = [names.setdefault(v, v) if len(names) < MAX_SHARED else v for _, v in batch]
    except duckdb.Error as error:
        raise ConfigError(
            f"{step}'s query fails: {str(error).splitlines()[0]}",
            expected=f"SQL that returns the columns row and {column}, from the table attributes "
            f"({', '.join(columns)})",
            do=f"start from the default query in {DOCS_URL}/corpus.md",
        ) from error
    finally:
        database.close()
    if n_found != found.sum():
        raise ConfigError(
            f"{step}'s query returns unknown rows, or a row more than once",
            expected=f"each row from 0 to {n_rows - 1} at most once",
            do="pass the column row through unchanged; GROUP BY row after a join",
        )
    return out
