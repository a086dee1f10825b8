"""Scripts without spaces: near copies are found as in English, and rules that count words do not drop their pages."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.deduplication import shingles
from whorl.corpus.deduplication.settings import MinHashConfig
from whorl.corpus.deduplication.shingles import TextBlock, block_shingles, jaccard_similarity, shingle_hashes
from whorl.corpus.measures.filters import FILTERS, filter_text
from whorl.corpus.rewrite_stages import C4LineConfig, bad_line
from whorl.tracking.progress import Progress

LETTERS = {
    "Chinese": [chr(0x4E00 + n) for n in range(2000)],
    "Japanese": [chr(0x3041 + n) for n in range(80)] + [chr(0x4E00 + n) for n in range(500)],
    "Thai": [chr(0x0E01 + n) for n in range(46)],
    "Tibetan": [chr(0x0F40 + n) + "\u0f0b" for n in range(40)],
    "Javanese": [chr(0xA984 + n) for n in range(47)],
    "English": [
        f"{a}{b} " for a in ("ka", "lo", "mi", "ne", "su", "ta") for b in ("ra", "vo", "zi", "pe", "du", "x")
    ],
}
N_DOCUMENTS, N_COPIES = 40, 10


def texts_of(language: str) -> list[str]:
    """Forty texts, and near copies of the first ten: a sentence is changed."""
    rng = random.Random(1)
    sentences = [
        ["".join(rng.choices(LETTERS[language], k=24)).strip() for _ in range(12)] for _ in range(N_DOCUMENTS)
    ]
    copies = [
        [*lines[:7], "".join(rng.choices(LETTERS[language], k=24)).strip(), *lines[8:]] for lines in sentences
    ]
    stop = "。" if language in ("Chinese", "Japanese") else " " if language == "Thai" else ". "
    joined = [stop.join(lines) + stop for lines in [*sentences, *copies[:N_COPIES]]]
    return [f"{text[: len(text) // 2]}\n\n{text[len(text) // 2 :]}" for text in joined]


def curated(tmp_path: Path, texts: list[str], **settings: Any) -> dict[str, Any]:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    out = tmp_path / "documents"
    out.mkdir()
    ingest(IngestConfig(sources=[str(tmp_path / "in")]), out, Progress.silent())
    chosen = tmp_path / "selection"
    chosen.mkdir()
    config = CurateConfig(validation_bytes=0, test_bytes=0, **settings)
    return curate(config, document_files(out), chosen, Progress.silent())


@pytest.mark.parametrize("language", LETTERS)
def test_near_copies_are_found_in_each_language(tmp_path: Path, language: str) -> None:
    found = curated(tmp_path, texts_of(language))
    assert found["near_duplicates"] == N_COPIES
    assert found["dropped"]["near_duplicate"]["documents"] == N_COPIES


@pytest.mark.parametrize("language", ["Chinese", "Japanese", "Thai"])
def test_rules_of_words_are_skipped_without_spaces(language: str) -> None:
    text = texts_of(language)[0]
    assert [filter_text(name, text) for name in FILTERS] == [""] * len(FILTERS)
    assert all(bad_line(line, C4LineConfig()) == "" for line in text.split("\n\n"))
    assert filter_text("gopher_repetition", f"{text}\n\n" * 4) == "paragraphs"
    assert bad_line(f"{text[:20]} JavaScript", C4LineConfig()) == "javascript"


def test_each_character_is_a_word_in_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MinHashConfig()
    one, other = "北京是中国的首都".encode(), "北京是中国的首府".encode()
    assert jaccard_similarity(one, other, config) == 3 / 5
    mixed = ["北京 is the首都 of ประเทศ。x", "words of English", "é è", "字", ""]
    block = TextBlock.of([text.encode() for text in mixed])
    for native in (shingles.library, lambda: None):
        monkeypatch.setattr(shingles, "library", native)
        found, first = block_shingles(block, config)
        sets = [set(found[a:b].tolist()) for a, b in itertools.pairwise(first)]
        assert sets == [shingle_hashes(text.encode(), config) for text in mixed]
    assert np.diff(first).tolist() == [10, 1, 1, 1, 1]
