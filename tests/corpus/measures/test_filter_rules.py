"""The rules of C4, Gopher and FineWeb against plain reference implementations, one text at a time."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from whorl.corpus import CurateConfig
from whorl.corpus.deduplication.shingles import NO_SPACES
from whorl.corpus.measures.filters import FILTERS, filter_text, filtered_query
from whorl.corpus.measures.language import language_of
from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.measures.repetition import DUPLICATE_ORDERS, TOP_ORDERS
from whorl.corpus.measures.rules import CITATION, POLICIES, STOP_WORDS
from whorl.corpus.measures.scan import TERMINAL, WORDLIKE, character_classes


def has(character: str, bit: int) -> bool:
    return bool(character_classes(ascii_only=False)[ord(character)] & bit)


def repeated(items: list[str]) -> tuple[int, int]:
    """Number and characters of the items that equal an earlier one."""
    seen, found = set[str](), []
    for item in items:
        if item in seen:
            found.append(item)
        seen.add(item)
    return len(found), sum(map(len, found))


def top(words: list[str], n: int) -> int:
    grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0
    gram, count = Counter(grams).most_common(1)[0]
    return len(gram) * count


def duplicated(words: list[str], n: int) -> int:
    seen, total, i = set[tuple[str, ...]](), 0, 0
    while i < len(words) - n + 1:
        gram = tuple(words[i : i + n])
        if gram in seen:
            total += len("".join(gram))
            i += n
        else:
            seen.add(gram)
            i += 1
    return total


def unspaced(text: str) -> float:
    """Share of the characters of scripts that write no spaces."""
    return len(NO_SPACES.findall(text)) / max(len(text), 1)


def c4(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "c4_lines": 0, "c4_sentences": 0, "c4_lorem_ipsum": False, "c4_curly_bracket": False,
    }  # fmt: skip
    for full in text.splitlines():
        words, line = full.split(), full.strip()
        end = CITATION.sub("", line) if line.endswith("]") else line
        if not words:
            continue
        if unspaced(line) <= 0.3:
            if any(len(word) > 1000 for word in words) or len(words) < 3:
                continue
            if not end.endswith((".", "?", "!", '"', "'")) or end.endswith("..."):
                continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            found["c4_lorem_ipsum"] = True
        elif "javascript" in lower:
            continue
        elif "{" in lower:
            found["c4_curly_bracket"] = True
        elif any(p in lower for p in POLICIES):
            continue
        if found["c4_lorem_ipsum"] or found["c4_curly_bracket"]:
            return {k: v for k, v in found.items() if isinstance(v, bool)}
        found["c4_lines"] += 1
        for word in words[:-1]:
            bare = word[:-1] if word[-1] in "\"')]”’»" else word
            found["c4_sentences"] += bool(bare) and has(bare[-1], TERMINAL)
        found["c4_sentences"] += 1
    return found


def reference(text: str) -> dict[str, Any]:
    words, n_characters = text.split(), max(len(text), 1)
    wordlike = [w for w in words if any(has(c, WORDLIKE) for c in w)]
    lines, n_words = text.splitlines(), max(len(words), 1)
    filled = [line for line in text.split("\n") if line.strip()]
    paragraphs = re.split(r"\n{2,}", text.strip()) if words else []
    by_feeds = re.split("\n+", text) if text else []
    duplicates = {"line": (by_feeds, repeated(by_feeds)), "paragraph": (paragraphs, repeated(paragraphs))}
    found = {
        "unspaced_fraction": unspaced(text), "n_words": len(words), "n_wordlike": len(wordlike),
        "mean_word_length": sum(map(len, wordlike)) / max(len(wordlike), 1),
        "hash_ratio": text.count("#") / n_words,
        "ellipsis_ratio": (text.count("...") + text.count("…")) / n_words,
        "bullet_line_fraction": sum(s.lstrip().startswith(("•", "-")) for s in lines) / max(len(lines), 1),
        "ellipsis_line_fraction": sum(s.rstrip().endswith(("...", "…")) for s in lines) / max(len(lines), 1),
        "letter_word_fraction": sum(any(c.isalpha() for c in w) for w in words) / n_words,
        "stop_words": len(set(words) & set(STOP_WORDS)),
        "terminal_line_fraction": sum(has(s[-1], TERMINAL) for s in filled) / max(len(filled), 1),
        "short_line_fraction": sum(len(s) <= 30 for s in filled) / max(len(filled), 1),
        "line_feeds_per_word": text.count("\n") / n_words,
        "line_repeat_characters": repeated(filled)[1] / max(len(text.replace("\n", "")), 1),
    }  # fmt: skip
    for name, (items, (number, size)) in duplicates.items():
        found[f"duplicate_{name}_fraction"] = number / max(len(items), 1)
        found[f"duplicate_{name}_characters"] = size / n_characters
    found |= {f"top_{n}_gram_characters": top(words, n) / n_characters for n in TOP_ORDERS}
    found |= {f"duplicate_{n}_gram_characters": duplicated(words, n) / n_characters for n in DUPLICATE_ORDERS}
    return found | c4(text)


PIECES = [
    "a", "b", "the", "of", "word.", 'quote."', "end?", "x{", "Lorem ipsum dolor", "JavaScript", "uses cookies", "#", "...",
    "…", "-", "•", "foo.[1]", "bar [edit]", "é", "日本。", "12", "!!", "(so.)", "b" * 1001, "1.2", "[", "]",
]  # fmt: skip
SEPARATORS = [
    " ", " ", " ", " ", "  ", "\n", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "\u2028", "\x0b", "\u3000", "\x1c",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(PIECES + SEPARATORS * 2), max_size=60).map("".join)
# Characters that this Python knows: the tables of `regex` may be of a later Unicode.
TEXT = st.text(st.characters(exclude_categories=("Cn", "Cs")), max_size=30)
REPEATED = st.tuples(SOUP, st.integers(1, 4)).map(lambda pair: (pair[0] + "\n") * pair[1])


@given(st.lists(st.one_of(SOUP, REPEATED, TEXT), min_size=1, max_size=5))
@example(["", "\n", "\n\n", " ", "a", "a\n", "\na\n", "a b " * 30, "a\n\na\n\na", "\n\na\n\n \n\na\n\n"])
@example(
    ["One two three. Use it!\nOne, two, three.\n- a b c...\n", "\ud800 x y.", "…", "..", "a\r\rb\r\n\nc"]
)
def test_rules_equal_the_reference(texts: list[str]) -> None:
    for text, found in zip(texts, measure_texts("rules", texts), strict=True):
        for name, value in reference(text).items():
            assert found[name] == pytest.approx(value), (name, text)


PROSE = (
    "The river that we have seen with the others runs to the sea, and it takes all of the small streams along its way. "
    "In spring the water rises, covers the lower meadows for some days, and leaves fine sand behind. Farmers know the "
    "signs well. They bring their cattle up to the hills before the flood comes. Children watch from the old bridge."
)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        *((name, PROSE, "") for name in FILTERS),
        ("gopher_quality", "Too short.", "short"),
        ("gopher_quality", "a b " + "the of " * 40, "short_words"),
        ("gopher_quality", PROSE + " #" * 40, "hashes"),
        ("gopher_quality", "\n".join(f"- {line}" for line in PROSE.split(".")), "bullets"),
        ("gopher_quality", PROSE.replace("the", "le").replace("to", "a").replace("of", "de"), ""),
        ("gopher_repetition", "\n".join([PROSE[:50], PROSE[:50], PROSE[50:]]), "lines"),
        ("gopher_repetition", "buy now " * 30, "top_2_gram"),
        ("c4", PROSE + " Lorem ipsum dolor sit amet.", "lorem_ipsum"),
        ("c4", "if (x) { return the value of x; } else stop here.", "curly_bracket"),
        ("c4", "One sentence of five words.", "few_sentences"),
        ("fineweb", PROSE.replace(".", ""), "few_line_ends"),
        ("fineweb", "\n".join(PROSE.split(" ")), "few_line_ends"),
        ("fineweb", f"{PROSE}\n{PROSE}", "repeated_lines"),
    ],
)
def test_filters_of_known_texts(name: str, text: str, reason: str) -> None:
    assert filter_text(name, text) == reason


def test_query_gives_the_reasons_of_the_plain_functions() -> None:
    texts = [
        PROSE, "Too short.", "buy now " * 30, f"{PROSE}\n{PROSE}", PROSE + " Lorem ipsum dolor sit amet.", "",
    ]  # fmt: skip
    rows = [{"row": i, **row} for i, row in enumerate(measure_texts("rules", texts))]
    database = duckdb.connect()
    database.register("attributes", pa.Table.from_pylist(rows))
    base = "SELECT row, CASE WHEN n_words = 0 THEN 'empty' ELSE '' END AS reason FROM attributes"
    found = dict(database.execute(filtered_query(base, list(FILTERS))).fetchall())
    database.close()
    for i, text in enumerate(texts):
        reasons = [f"{name}:{reason}" for name in FILTERS if (reason := filter_text(name, text))]
        assert found[i] == ("empty" if not text else reasons[0] if reasons else "")
    assert [
        m.name for m in CurateConfig(filters=["c4", "fineweb"], measures=["language"]).measure_configs
    ] == ["text", "language", "rules"]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", PROSE),
        (
            "de",
            "Der Fluss, den wir mit den anderen gesehen haben, fließt in das Meer und nimmt auch die Bäche auf.",
        ),
        (
            "fr",
            "La rivière que nous avons vue avec les autres coule vers la mer et elle prend aussi les ruisseaux.",
        ),
        (
            "it",
            "Il fiume che abbiamo visto con gli altri scorre verso il mare e prende anche i ruscelli della valle.",
        ),
        (
            "es",
            "El río que hemos visto con los otros corre hacia el mar y también toma los arroyos del valle.",
        ),
        ("ja", "この川は海へ流れています。The file /etc/fstab を編集して、コマンドを実行してください。"),
        ("zh", "这条河流向大海。请编辑 /etc/fstab 文件，然后运行命令。"),
        ("ru", "Эта река течет в море, и она не только широкая, но и глубокая, как все реки в долине."),
        ("ko", "이 강은 바다로 흐릅니다."),
        ("", "12 + 34 = 46"),
        ("", ""),
    ],
)
def test_language_of_known_texts(language: str, text: str) -> None:
    assert language_of(text) == language
    assert measure_texts("language", ["x", text, "the of and"])[1]["text_language"] == language


ENGLISH = "The boot loader is started by the firmware, and it loads the kernel that you have in the image. "
FRENCH = "Le chargeur est lancé par le système, et il charge le noyau qui est dans une image. "


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("fr", 2 * ENGLISH + FRENCH),  # a page that is half translated
        ("en", 9 * ENGLISH + FRENCH),  # a quotation
        ("en", ENGLISH + "La Rue de la Paix, rue de la Gare, les Halles: de la, de la, les."),  # names
        ("en", ENGLISH + 20 * "que "),  # one word, often
    ],
)
def test_language_with_more_english_than_other_words(language: str, text: str) -> None:
    assert language_of(text) == language
