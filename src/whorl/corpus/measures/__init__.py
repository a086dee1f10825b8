"""Measures: named, versioned functions of documents' texts, whose columns the selection queries.

    found = measure_files([MeasureConfig(name="text", measure="text")], documents, UnitStore(folder), LocalPool(4))

A measure drops no document and changes no text. See `docs/corpus.md`.
"""

from whorl.corpus.measures.filters import FILTERS, Filter, check_filter, filter_text, filtered_query
from whorl.corpus.measures.measure import MEASURES, Columns, Measure, MeasureConfig, Texts, measure_texts
from whorl.corpus.measures.run import check_columns, measure_files, with_model_digest

__all__ = [
    "FILTERS",
    "MEASURES",
    "Columns",
    "Filter",
    "Measure",
    "MeasureConfig",
    "Texts",
    "check_columns",
    "check_filter",
    "filter_text",
    "filtered_query",
    "measure_files",
    "measure_texts",
    "with_model_digest",
]
