"""Pre-tokens: the pieces of text that byte-pair encoding works on, and their counts.

A token never crosses the border of a pre-token, so the pattern below limits the vocabulary. It follows GPT-2 (Radford et al.
2019) and its successors, adapted to source code. A word includes one character before it (a space, a dot, an underscore, an
opening bracket). Digits come in threes at most. A run of signs includes the blanks on both sides, line break and
indentation included. So " = ", or "):" with the next line's indentation, can be one token.

    bytes per token, standard library, trained on one half      8,192 tokens    1,024 tokens
    this pattern                                                        4.18            2.74
    GPT-4's pattern                                                     3.73            2.56
    this pattern without the blanks after signs                         3.82            2.63

An n-gram model on top gains 1 to 3 % in bits per byte as well.

Subtle: the pattern reads at most one character past the end of a match, and never back. Hence (1) it needs no lookaround,
and every engine runs it as a plain automaton, and (2) a piece that ends before the end of the text so far is final. Streams
rely on that, and on `SAFE_BORDER`: between a letter or digit and a space or line break there is always a border. Bytes that
are not UTF-8 form separate pieces (`split_invalid_utf8`), so any bytes are learned from, encoded and decoded exactly.
ASCII text uses `re`, which gives the same pieces as `regex` in half the time. A tokenizer may have another pattern; then
`regex` splits all text. The named ones look ahead, past runs of blanks, so (2) does not hold for them; they stream by their
own safe borders, `NAMED_BORDER`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from itertools import chain
from multiprocessing import get_context

import regex

from whorl.errors import ConfigError, DataError
from whorl.machine.device_probe import usable_cores

# A word with the one character before it | up to three digits
# | signs with the space before them and the line breaks and blanks after them | line breaks with the
# indentation after them | other blanks.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^ \t\r\n\p{L}\p{N}]+[\r\n]*[ \t]*|[\r\n]+[ \t]*|[ \t]+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Patterns by name. GPT-2's is that of its `encoder.py`, cl100k is GPT-4's and Llama 3's, o200k GPT-4o's.
PATTERNS = {
    "whorl": PATTERN,
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    "qwen2": rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
}

# Between a letter or digit and a blank there is a border in any text, for any surroundings.
SAFE_BORDER = regex.compile(r"(?r)(?<=[A-Za-z0-9])[ \t\r\n]")
# The same for the other named patterns. In their pieces, neither a blank nor a sign except "'" follows a letter or digit.
# Before a space or tab there are blanks only. The lookahead is at the end of a run of blanks, which no such border follows.
# Only characters that every version of Unicode puts into these classes are listed.
NAMED_BORDER = regex.compile(
    r"(?r)(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])"
    r"[\t-\r !-&(-/:-@\[-`{-~\u3000-\u3002\uff01\uff0c\uff1f]|(?<=\S)[ \t\u3000]"
)
BORDERS = {pattern: SAFE_BORDER if pattern == PATTERN else NAMED_BORDER for pattern in PATTERNS.values()}

_unicode_pattern = regex.compile(PATTERN)
_ascii_pattern = re.compile(
    PATTERN.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    .replace(r"[^ \t\r\n\p{L}\p{N}]", r"[^ \t\r\nA-Za-z0-9]")
    .replace(r"\p{L}", "[A-Za-z]")
    .replace(r"\p{N}", "[0-9]")
)
# Invalid bytes, as Python's "surrogateescape" writes them.
INVALID_RUN = re.compile("[\udc80-\udcff]+")

_BATCH_BYTES = 1 << 20  # text sent to a worker at a time
_MIN_POOL_BYTES = 4 << 20  # below this, starting processes costs more than it saves


def split_pretokens(text: str, pattern: str = PATTERN) -> list[str]:
    """Split valid text into pre-tokens; their concatenation is the text.

    Raises:
        ConfigError: the pattern is no regular expression.
        DataError: the pattern leaves out a part of the text.
    """
    if pattern == PATTERN:
        return _compiled(text, pattern).findall(text)
    pieces = [match.group() for match in _compiled(text, pattern).finditer(text)]
    if sum(map(len, pieces)) != len(text):
        raise incomplete_pattern(pattern)
    return pieces


def _compiled(text: str, pattern: str) -> re.Pattern[str] | regex.Pattern[str]:
    """Return the fastest compiled form of the pattern for this text: of `re` or of `regex`."""
    if pattern == PATTERN:
        return _ascii_pattern if text.isascii() else _unicode_pattern
    return compile_pattern(pattern)


@cache
def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Return a compiled split pattern.

    Raises:
        ConfigError: it is no regular expression.
    """
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(
            f"the split pattern {pattern!r} is no regular expression: {error}",
            expected=f"a pattern, or one of the names {', '.join(PATTERNS)}",
        ) from error


def incomplete_pattern(pattern: str) -> DataError:
    """Return the error of a pattern that leaves out characters, which no token could hold."""
    return DataError(
        f"the split pattern {pattern!r} leaves out a part of the text",
        expected="pieces whose concatenation is the text",
        do=r"add an alternative for the rest: |[\s\S]",
    )


def last_pretoken(text: str, pattern: str = PATTERN) -> str:
    """Return the last item of `split_pretokens`, or "" of an empty text, without holding the interpreter's lock for long."""
    start = 0
    for match in _compiled(text, pattern).finditer(text):
        start = match.start()
    return text[start:]


def split_invalid_utf8(data: str | bytes) -> Iterator[str | bytes]:
    """Split data into valid text (`str`) and runs of bytes that are not UTF-8 (`bytes`), in order.

    A `str` with lone surrogates, which UTF-8 cannot hold, counts as the bytes that "surrogatepass" gives.
    """
    if isinstance(data, str):
        try:
            data.encode()
        except UnicodeEncodeError:
            data = data.encode("utf-8", "surrogatepass")
        else:
            if data:
                yield data
            return
    text = data.decode("utf-8", "surrogateescape")
    start = 0
    for run in INVALID_RUN.finditer(text):
        if run.start() > start:
            yield text[start : run.start()]
        yield run.group().encode("utf-8", "surrogateescape")
        start = run.end()
    if start < len(text):
        yield text[start:]


def special_token_pattern(special_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds special tokens, the longest first; None if there are none."""
    if not special_tokens:
        return None
    return re.compile("|".join(re.escape(s) for s in sorted(special_tokens, key=len, reverse=True)))


def count_pretokens(
    texts: Iterable[str | bytes],
    special_tokens: Sequence[str] = (),
    workers: int | None = None,
    pattern: str = PATTERN,
) -> Counter[bytes]:
    """Count each pre-token of a split pattern, in `workers` processes (None: the available cores, at most two).

    Special tokens are removed first and are not counted. Memory: the counts, plus a few MB per worker.
    """
    workers = min(2, usable_cores()) if workers is None else workers
    batches = _batches(texts)
    if workers <= 1:
        return _count_all(batches, special_tokens, pattern)
    head: list[list[str | bytes]] = []
    for batch in batches:
        head.append(batch)
        if len(head) * _BATCH_BYTES >= _MIN_POOL_BYTES:
            break
    else:
        return _count_all(head, special_tokens, pattern)
    total: Counter[str | bytes] = Counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting: set[Future[Counter[str | bytes]]] = set()
        for batch in chain(head, batches):
            waiting.add(pool.submit(_count_batch, batch, special_tokens, pattern))
            if len(waiting) > 2 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    total.update(future.result())
        for future in waiting:
            total.update(future.result())
    return _to_bytes(total)


def _batches(texts: Iterable[str | bytes]) -> Iterator[list[str | bytes]]:
    batch: list[str | bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _count_all(batches: Iterable[list[str | bytes]], specials: Sequence[str], pattern: str) -> Counter[bytes]:
    total: Counter[str | bytes] = Counter()
    for batch in batches:
        _count_into(total, batch, specials, pattern)
    return _to_bytes(total)


def _count_batch(batch: list[str | bytes], specials: Sequence[str], pattern: str) -> Counter[str | bytes]:
    counts: Counter[str | bytes] = Counter()
    _count_into(counts, batch, specials, pattern)
    return counts


def _count_into(
    counts: Counter[str | bytes], batch: list[str | bytes], specials: Sequence[str], pattern: str
) -> None:
    special = special_token_pattern(specials)
    for data in batch:
        for segment in split_invalid_utf8(data):
            if isinstance(segment, bytes):
                counts[segment] += 1
            else:
                for text in special.split(segment) if special else (segment,):
                    counts.update(split_pretokens(text, pattern))


def _to_bytes(counts: Counter[str | bytes]) -> Counter[bytes]:
    return Counter({k if isinstance(k, bytes) else k.encode(): n for k, n in counts.items()})
