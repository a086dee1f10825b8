"""Bad words of C4: how often words of a list occur in a text.

C4 drops pages with any word of the "List of Dirty, Naughty, Obscene or Otherwise Bad Words" (Raffel et al. 2020, section
2.2). The list is the measure's model: a file of UTF-8 with a word or phrase per line.

    measures = [{ name = "bad", measure = "bad_words", model = "en.txt" }]      column bad_words

Case and white space do not count. An entry is a whole word, except in scripts that write no spaces between words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from whorl.corpus.deduplication.shingles import NO_SPACES
from whorl.corpus.measures.measure import Columns, Measure, Texts
from whorl.errors import ConfigError


def open_list(path: str) -> Callable[[Texts], Columns]:
    """Return the function that counts the entries of a list. Raises ConfigError: it is empty, or no UTF-8."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the list of bad words {path} cannot be read: {error}", expected="a file of UTF-8"
        ) from error
    entries = sorted({" ".join(line.lower().split()) for line in lines} - {""}, key=lambda e: (-len(e), e))
    if not entries:
        raise ConfigError(f"the list of bad words {path} is empty", expected="a word or phrase per line")
    pattern = re.compile("|".join(map(_pattern, entries)))

    def count(batch: Texts) -> Columns:
        return {"words": [sum(1 for _ in pattern.finditer(text.lower())) for text in batch.texts]}

    return count


def _pattern(entry: str) -> str:
    words = r"\s+".join(map(re.escape, entry.split(" ")))
    return words if NO_SPACES.search(entry) else rf"(?<!\w){words}(?!\w)"


BAD_WORDS = Measure(
    "bad_words", 1, "Raffel et al. 2020, C4, section 2.2", {"words": "int64"}, open_list, needs_model=True
)
