"""The seven probes: each writes one line of text at a difficulty level, with a question whose answer the line contains.

    induction   induction c q f c t q t f then q t f               what followed two letters the last time
    recall      recall a b K a c Q d b M then a c Q a b K ...      the value of a key of two letters
    copying     copying f q q f t t to f q q f t t                 the letter at the same place
    sorting     sorting t q c f to c f q t                         the next letter in order
    brackets    brackets A B b C D d c a                           the closing letter of the innermost open one
    arithmetic  arithmetic 4 7 minus 8 is 3 9                      the value
    state       state a K b Q c M d T swap a b then a Q b K ...    the content of a cup after swaps

A line is complete text, so lines of a training split teach the form. A question cuts it (`ProbeLine.cut`): the answer
is the next symbol, or for arithmetic the rest.

Symbols are letters, digits and words, separated by spaces, because tokenizers merge punctuation with the spaces and line
breaks around it: brackets are pairs of letters, and a line begins with a word, where a letter has
no space before it.

The subtle point is the score of a model without the skill. The choices are drawn so that no constant preference helps,
and repetition least of all: all choices of recall and state occur once before the question, those of induction about
equally often. In sorting and arithmetic the rank of the correct choice is uniform, so neither the smallest nor the
largest nor the middle is right more often. A cup has its first content as often as each other one. So chance is
1 / choices. Parts of a skill give more: a model that only counts what it still has to write reaches 0.43 in copying and
0.52 in sorting. Lengths vary within a level, so a fixed distance to the original is no rule for a copy.

Sources: induction: Olsson et al. 2022, arXiv:2209.11895. Recall: Arora et al. 2023, arXiv:2312.04927. Copying: Jelassi
et al. 2024, arXiv:2402.01032. Brackets (Dyck-k): Hewitt et al. 2020, arXiv:2010.07515. State: Li et al. 2021,
arXiv:2106.00737, and Merrill et al. 2024, arXiv:2404.08819 (a composition of permutations).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase

import numpy as np

CHOICES = 4
OPENING, CLOSING = "ABCD", "abcd"
WORD_LETTERS = "abcdef"
CUPS, CONTENTS = "abcd", "WXYZ"


@dataclass(frozen=True)
class ProbeLine:
    """One line with a question.

    Attributes:
        symbols: of the whole line; the text joins them with spaces.
        cut: the symbols before the question.
        answer: symbols of the answer, from `cut` on.
        choices: CHOICES answers, each as its symbols joined with spaces; one is correct.
    """

    symbols: tuple[str, ...]
    cut: int
    answer: int
    choices: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.symbols)

    @property
    def prompt(self) -> str:
        """The text before the answer."""
        return " ".join(self.symbols[: self.cut])

    @property
    def gold(self) -> int:
        """Index of the correct choice."""
        return self.choices.index(" ".join(self.symbols[self.cut : self.cut + self.answer]))


Rng = np.random.Generator
Generate = Callable[[Rng, int], ProbeLine]


def _letters(rng: Rng, n: int, alphabet: str = ascii_lowercase) -> list[str]:
    """Return n distinct letters in random order."""
    return [alphabet[i] for i in rng.permutation(len(alphabet))[:n]]


def _choices(rng: Rng, gold: str, others: Sequence[str]) -> tuple[str, ...]:
    """Return the correct choice and three of the others, in random order."""
    wrong = [others[i] for i in rng.permutation(len(others))[: CHOICES - 1]]
    found = [gold, *wrong]
    return tuple(found[i] for i in rng.permutation(len(found)))


def induction(rng: Rng, level: int) -> ProbeLine:
    """Letters, then a stretch of them again. level: each letter occurs 1, 2, 3, 3, 4 times, before different ones.

    With 4 occurrences the choices are the 4 letters that follow the letter before the question, so one letter of
    context is not enough: the stretch is found by two.
    """
    n, times, length = ((12, 1, 5), (9, 2, 7), (8, 3, 9), (7, 3, 9), (6, 4, 11))[level - 1]
    n, length = n + int(rng.integers(0, 3)), length + int(rng.integers(0, 3))
    letters = _trail(rng, _letters(rng, n), times)
    begin = int(rng.integers(0, len(letters) - length))
    asked = int(rng.integers(2, length + 1))  # letters of the stretch before the question
    gold, last = letters[begin + asked], letters[begin + asked - 1]
    shown = set(letters[begin : begin + asked])
    followers = {y for x, y in pairwise(letters) if x == last} - {gold}
    mixed = [letters[i] for i in rng.permutation(len(letters)) if letters[i] != gold]
    mixed.sort(key=lambda y: (y not in followers, y in shown))  # the ones that are harder to exclude first
    others = list(dict.fromkeys(mixed))[: CHOICES - 1]
    symbols = ("induction", *letters, "then", *letters[begin : begin + length + 1])
    return ProbeLine(symbols, 2 + len(letters) + asked, 1, _choices(rng, gold, others))


def _trail(rng: Rng, letters: Sequence[str], times: int) -> list[str]:
    """Return a sequence in which each letter occurs `times` times and no pair of neighbors occurs twice.

    It is an Euler circuit (Hierholzer's method) of the directed graph with an edge from each letter v to v + k modulo n,
    for `times` random numbers k.
    """
    n = len(letters)
    while True:
        steps = [int(k) + 1 for k in rng.permutation(n - 1)[:times]]
        edges = [[(v + steps[i]) % n for i in rng.permutation(times)] for v in range(n)]
        path, circuit = [int(rng.integers(0, n))], list[int]()
        while path:
            if edges[path[-1]]:
                path.append(edges[path[-1]].pop())
            else:
                circuit.append(path.pop())
        if len(circuit) == n * times + 1:
            return [letters[v] for v in circuit[:0:-1]]


def recall(rng: Rng, level: int) -> ProbeLine:
    """Keys of two letters with values, then 8 of the keys, or all. level: number of keys.

    The keys of level 1 have no common letter: there are 4 or 5. At the others there are 4, 6, 8 or 11, or one more.
    """
    n, side = ((4, 5), (4, 3), (6, 3), (8, 3), (11, 4))[level - 1]
    n += int(rng.integers(0, 2))
    first, second = _letters(rng, side), _letters(rng, side)
    cells = (
        [(k, k) for k in range(n)]
        if level == 1
        else [divmod(int(c), side) for c in rng.permutation(side * side)[:n]]
    )
    keys, values = [(first[i], second[j]) for i, j in cells], _letters(rng, n, ascii_uppercase)
    order = [int(i) for i in rng.permutation(n)[: 2 * CHOICES]]
    asked = int(rng.integers(0, n - CHOICES + 1 if n < 2 * CHOICES else CHOICES))
    symbols = ["recall", *(x for i in range(n) for x in (*keys[i], values[i]))]
    symbols += ["then", *(x for i in order for x in (*keys[i], values[i]))]
    gold, shown = order[asked], set(order[: asked + 1])
    near = [i for i in range(n) if i not in shown and _share(cells[i], cells[gold])]
    far = [i for i in range(n) if i not in shown and i not in near]
    others = [part[i] for part in (near, far) for i in rng.permutation(len(part))][: CHOICES - 1]
    cut = 1 + 3 * n + 1 + 3 * asked + 2
    return ProbeLine(tuple(symbols), cut, 1, _choices(rng, values[gold], [values[i] for i in others]))


def _share(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] == b[0] or a[1] == b[1]


def copying(rng: Rng, level: int) -> ProbeLine:
    """Letters, each several times, in random order, and a copy. level: 4 to 7 letters, each 2, 3, 4, 5, 6 times.

    The longer the line, the more letters of context distinguish the places in it.
    """
    distinct = _letters(rng, int(rng.integers(4, 8)))
    letters = [((level + 1) * distinct)[i] for i in rng.permutation((level + 1) * len(distinct))]
    asked = int(rng.integers(0, len(letters)))
    gold = letters[asked]
    symbols = ["copying", *letters, "to", *letters]
    others = [letter for letter in distinct if letter != gold]
    return ProbeLine(tuple(symbols), len(letters) + 2 + asked, 1, _choices(rng, gold, others))


def sorting(rng: Rng, level: int) -> ProbeLine:
    """Words of two letters of six, then the same in alphabetical order. level: 4 to 6 words, 7 to 9, ..., 16 to 18.

    The wrong choices are the neighbors of the correct word in the order.
    """
    n = 1 + 3 * level + int(rng.integers(0, 3))
    words = [f"{WORD_LETTERS[i // 6]} {WORD_LETTERS[i % 6]}" for i in rng.permutation(36)[:n]]
    ordered = sorted(words)
    below = int(rng.integers(0, CHOICES))  # wrong choices that precede the correct one
    asked = int(rng.integers(below, n - (CHOICES - 1 - below)))
    near = ordered[asked - below : asked] + ordered[asked + 1 : asked + CHOICES - below]
    symbols = " ".join(["sorting", *words, "to", *ordered]).split()
    return ProbeLine(tuple(symbols), 2 * (n + 1 + asked), 2, _choices(rng, ordered[asked], near))


def brackets(rng: Rng, level: int) -> ProbeLine:
    """Nested brackets of four kinds (Dyck-4). level: 2 to 7, 8 to 13, ..., 26 to 31 pairs inside the one to close."""
    outer = [int(k) for k in rng.integers(0, CHOICES, int(rng.integers(2, 5)))]  # kinds, outermost first
    kind = outer[-1]
    inner = _balanced(rng, 6 * level - int(rng.integers(-1, 5)))
    symbols = ["brackets", *(OPENING[k] for k in outer), *inner]
    cut = len(symbols)
    symbols += [CLOSING[k] for k in reversed(outer)]
    return ProbeLine(
        tuple(symbols), cut, 1, _choices(rng, CLOSING[kind], [c for c in CLOSING if c != CLOSING[kind]])
    )


def _balanced(rng: Rng, pairs: int) -> list[str]:
    """Return a sequence of balanced brackets."""
    symbols, opened, left = list[str](), list[int](), pairs
    while left or opened:
        if left and (not opened or rng.integers(0, 2)):
            opened.append(int(rng.integers(0, CHOICES)))
            symbols.append(OPENING[opened[-1]])
            left -= 1
        else:
            symbols.append(CLOSING[opened.pop()])
    return symbols


def arithmetic(rng: Rng, level: int) -> ProbeLine:
    """A sum or difference. level: terms of one digit: 2, 3; of two digits: 2, 3; two terms of three digits."""
    digits, terms = ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2))[level - 1]
    low, below = 10 ** (digits - 1), int(rng.integers(0, CHOICES))  # wrong choices that are smaller
    while True:
        numbers = [int(x) for x in rng.integers(low, 10 * low, terms)]
        signs = ["+-"[int(i)] for i in rng.integers(0, 2, terms - 1)]
        value = numbers[0] + sum(x if s == "+" else -x for s, x in zip(signs, numbers[1:], strict=True))
        sides = [(below, -1), (CHOICES - 1 - below, 1)]
        offsets = [side * int(x) for count, side in sides for x in _offsets(rng, count, digits)]
        wrong = [value + x for x in offsets]
        if (
            min([value, *wrong]) > 0
            and len({len(str(x)) for x in [value, *wrong]}) == 1
            and value not in numbers
        ):
            break
    symbols = ["arithmetic", *str(numbers[0])]
    for sign, number in zip(signs, numbers[1:], strict=True):
        symbols += ["plus" if sign == "+" else "minus", *str(number)]
    symbols.append("is")
    answer = tuple(str(value))
    choices = _choices(rng, " ".join(answer), [" ".join(str(x)) for x in wrong])
    return ProbeLine((*symbols, *answer), len(symbols), len(answer), choices)


def _offsets(rng: Rng, count: int, digits: int) -> list[int]:
    sizes = (1, 2, 3, 10, 11, 9, 20) if digits > 1 else (1, 2, 3, 4)
    return [sizes[i] for i in rng.permutation(len(sizes))[:count]]


def state(rng: Rng, level: int) -> ProbeLine:
    """Four cups, contents, swaps of two cups, then the contents. level: swaps."""
    cups, contents = CUPS, _letters(rng, 4, CONTENTS)
    where = list(range(4))  # content of each cup
    swaps = list[str]()
    for _ in range(level):
        a, b = (int(i) for i in rng.permutation(4)[:2])
        where[a], where[b] = where[b], where[a]
        swaps += ["swap", cups[a], cups[b]]
    keeps = [i for i in range(4) if where[i] == i]
    moved = [i for i in range(4) if where[i] != i]
    pool = keeps if keeps and (not moved or rng.random() < 1 / CHOICES) else moved
    first = pool[int(rng.integers(0, len(pool)))]
    order = [first, *(int(i) for i in rng.permutation(4) if i != first)]
    begin = [symbol for pair in zip(cups, contents, strict=True) for symbol in pair]
    end = [symbol for i in order for symbol in (cups[i], contents[where[i]])]
    symbols = ["state", *begin, *swaps, "then", *end]
    gold = contents[where[first]]
    others = [v for v in contents if v != gold]
    return ProbeLine(tuple(symbols), len(symbols) - len(end) + 1, 1, _choices(rng, gold, others))


LEVELS = 5
PROBES: dict[str, Generate] = {
    "induction": induction,
    "recall": recall,
    "copying": copying,
    "sorting": sorting,
    "brackets": brackets,
    "arithmetic": arithmetic,
    "state": state,
}
