"""Windows over a long text: each id is scored in exactly one, with context from the ids before it.

    ids      0 1 2 3 4 5 6 7 8 9          length 6, stride 4; the first id is context only
    window   0 1 2 3 4 5 [6]              scores 1 .. 6
                     4 5 6 7 8 9          scores 7 .. 9, after 4, 5, 6

Each id has at least `length - stride` ids of context where the text has so many (Press et al. 2021, arXiv:2012.15832,
section 2). `stride = length` gives the windows of lm-evaluation-harness's `loglikelihood_rolling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whorl.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """ids[start:stop] of a text, of which ids[first:stop] are scored; start < first. The last id is only a target."""

    start: int
    first: int
    stop: int


def strided_windows(n_ids: int, length: int, stride: int, *, fill_last: bool = True) -> Iterator[Window]:
    """Yield the windows of a text of `n_ids` ids, the first of which is context only.

    Args:
        length: inputs of a window, at most.
        stride: ids that a window scores, after the first one, which scores `length`.
        fill_last: move the last window to the left until it is full, for more context; otherwise it begins a whole number
            of strides from the start.

    Raises:
        ConfigError: length or stride below 1, or a stride above the length.
    """
    if not 1 <= stride <= length:
        raise ConfigError(f"stride is {stride} and window {length}", expected="1 <= stride <= window")
    start, first = 0, 1
    while first < n_ids:
        stop = min(start + length + 1, n_ids)
        yield Window(max(0, stop - length - 1) if fill_last else start, first, stop)
        first = stop
        start += stride
