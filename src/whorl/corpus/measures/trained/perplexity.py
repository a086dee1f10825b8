"""Perplexity of texts under an n-gram model of hashed words, trained on texts that the user names (Wenzek et al. 2020).

    train_perplexity(["wikipedia.jsonl"], Path("encyclopedia.safetensors"))
    CurateConfig(measures=[{"name": "wiki", "measure": "perplexity", "model": "encyclopedia.safetensors"}])

The model is `kneser_ney.NGram`. Words are those of `decontamination/words.py`, as ids: their hash modulo 2^20. With n words,

    perplexity = 2 ^ (- 1 / (n + 1) (log2 p(end | ...) + sum over words of log2 p(word | words before it))).

A low value means that the text is like the training texts; also repeated text is. Values of two models are not comparable.

Memory is bounded: training reads at most `max_words` words (about 85 bytes each), and the model keeps n-grams that occur
`min_count` times. The summary counts the words that were left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whorl.corpus.decontamination.words import hash_words
from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.corpus.measures.run import text_batches
from whorl.corpus.measures.trained.hashed_ngrams import (
    Floats,
    check_training,
    load_model,
    read_samples,
    save_model,
)
from whorl.corpus.measures.trained.kneser_ney import NGram
from whorl.errors import ConfigError

N_WORDS = 1 << 20  # ids of words; then the end and the begin of a text
END, BEGIN = N_WORDS, N_WORDS + 1
KIND = "perplexity"


def train_perplexity(
    samples: Sequence[str], out: Path, *, field: str = "text", order: int = 3, min_count: int = 2,
    max_words: int = 10_000_000,
) -> dict[str, Any]:  # fmt: skip
    """Train an n-gram model on texts and write it.

    Args:
        samples: JSONL, Parquet, Arrow or tar files; patterns and URLs are allowed.
        out: file of the model.
        field: the text's field in each record.
        order: words of the longest n-gram.
        min_count: rarer n-grams of two and more words are pruned.
        max_words: further texts are not read.

    Returns:
        `texts`, `words`, `texts_left_out`, `n_grams`.

    Raises:
        ConfigError: `out` cannot be written, or a setting is out of range.
        DataError: a file cannot be read, or has no text.
    """
    if not 1 <= order <= 6 or min_count < 1 or max_words < 1:
        raise ConfigError(
            f"order is {order}, min_count {min_count} and max_words {max_words}",
            expected="an order of 1 to 6, the others at least 1",
        )
    check_training(samples, [], ("training", ""), out)
    texts = read_samples(samples, field, "training")
    documents, n_words = [], 0
    for ids in _word_ids(texts):
        documents.append(ids)
        n_words += len(ids) - 1
        if n_words >= max_words:
            break
    model = NGram(documents, N_WORDS + 2, order, BEGIN, min_count)
    summary = {
        "texts": len(documents), "words": n_words, "texts_left_out": len(texts) - len(documents),
        "n_grams": model.n_grams, "order": order, "min_count": min_count,
    }  # fmt: skip
    save_model(out, KIND, model.arrays(), summary)
    return summary


def open_perplexity(model: str) -> Callable[[Texts], Columns]:
    """Return the measure of a trained model. Raises DataError: the file is no such model, or damaged."""
    ngram = NGram.from_arrays(load_model(model, KIND)[0])
    return lambda batch: {"perplexity": perplexities(ngram, batch.texts)}


def perplexities(model: NGram, texts: Sequence[str]) -> Floats:
    """Return the perplexity of each text, [n_texts]; that of a text without words is the one of its end."""
    documents = list(_word_ids(texts))
    found: Floats = 2.0 ** (-model.log2_sums(documents) / np.array([len(ids) for ids in documents]))
    return found


def _word_ids(texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for batch in text_batches(texts):
        words = hash_words(batch)
        ids = (words.hashes % np.uint64(N_WORDS)).astype(np.int64)
        for start, stop in zip(words.first, words.first[1:], strict=False):
            yield np.append(ids[start:stop], END)


PERPLEXITY = Measure(
    KIND,
    1,
    "Wenzek et al. 2020, CCNet, arXiv:1911.00359; Chen and Goodman 1999",
    {"perplexity": "float64"},
    open_perplexity,
    needs_model=True,
)
