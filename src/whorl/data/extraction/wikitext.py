"""Wikitext as plain text, in time linear in its length; any string is accepted.

| markup | text |
|---|---|
| `[[target|label]]`, `[https://... label]` | the label |
| file and category links, references, galleries, comments, templates | nothing |
| templates of `KEPT_ARGUMENT` (`{{lang|fr|mot}}`) | the named argument |
| tables | one line per row, cells separated by tabs |
| headings, list items | one line each, without the marks |
| `nowiki`, `pre`, `syntaxhighlight`, `math` | the content as written |

Markup that is not closed is removed, and its content stays. Templates are not expanded, since their definitions
are other pages: text that only a template holds, such as the number in `{{convert|5|km}}`, is lost unless listed.

The subtle part is linear time: brackets are matched on a stack of at most `MAX_DEPTH` frames, and a missing end
tag is searched for once.
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterator

MAX_DEPTH = 40
FILE_AND_CATEGORY = ("file", "image", "category")
# Template -> the number of the argument that it shows, from 1.
KEPT_ARGUMENT = {
    "lang": 2, "langx": 2, "transliteration": 2, "transl": 2, "nowrap": 1, "nobr": 1, "nobold": 1, "abbr": 1, "small": 1,
    "smaller": 1, "big": 1, "em": 1, "strong": 1, "mono": 1, "code": 1, "tt": 1, "kbd": 1, "var": 1, "math": 1, "mvar": 1,
    "angbr": 1, "quote": 1, "blockquote": 1, "sup": 1, "sub": 1,
}  # fmt: skip
VERBATIM = ("pre", "syntaxhighlight", "source", "math", "chem")  # and nowiki, inside a line
DROPPED = (
    "ref", "references", "gallery", "timeline", "score", "imagemap", "templatestyles", "graph", "mapframe", "maplink",
    "hiero", "categorytree",
)  # fmt: skip
BLOCKS = "br|p|div|center|blockquote|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|poem|section"
INLINE = (
    "b|i|u|s|em|strong|small|big|sup|sub|span|font|tt|code|kbd|var|samp|cite|q|del|ins|abbr|bdi|bdo|dfn|mark|td|th|"
    "caption|thead|tbody|noinclude|includeonly|onlyinclude|nowiki|wbr|hr|ruby|rb|rt|rp|data|time"
)
# Marks of this module in the text; no XML 1.0 file holds these characters.
LITERAL, END, GAP = "\x01", "\x02", "\x03"
MARKS = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f]")
ELEMENT = re.compile(
    rf"<!--|<({'|'.join(('nowiki', *VERBATIM, *DROPPED))})(?=[\s/>])([^<>]*)>", re.IGNORECASE
)
CLOSE = {
    name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("nowiki", *VERBATIM, *DROPPED)
} | {"!--": re.compile("-->")}  # fmt: skip
BRACKET = re.compile(r"\{{2,}|\}{2,}|\[\[|\]\]|^\{\||^\|\}(?!\})", re.MULTILINE)
EXTERNAL = re.compile(
    r"\[(?:https?:|ftps?:|mailto:|irc:|news:)?(?://|(?<=mailto:))[^\s\[\]<>]*[ \t]*([^\[\]\n]*)\]"
)
TAG = re.compile(
    rf"</?(?:({BLOCKS})|{INLINE}|{'|'.join((*VERBATIM, *DROPPED))})(|[\s/][^<>]*)>|<!--|-->", re.IGNORECASE
)
QUOTES = re.compile("'{2,5}")
LIST_MARKS = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
HEADING = re.compile(r"^={1,6}([^=\n].*?)=+[ \t]*$", re.MULTILINE)
RULER = re.compile(r"^-{4,}", re.MULTILINE)
SWITCH = re.compile(r"__(?:(?:NO|FORCE)?TOC|NOEDITSECTION|(?:NO)?INDEX|NOGALLERY|NEWSECTIONLINK|DISAMBIG)__")
EMPTIED = re.compile(rf" ?\([{GAP}\s,;]*\)")
LITERALS = re.compile(rf"{LITERAL}(\d+){END}")
SPACE_BEFORE_LINE_END = re.compile(r"(?<![ \t])[ \t]+$", re.MULTILINE)
EMPTY_LINES = re.compile(r"\n{3,}")


def plain_text(wikitext: str, *, dropped: Collection[str] = FILE_AND_CATEGORY) -> str:
    """Return the text of a page.

    Args:
        dropped: names, in lower case, of the namespaces whose links show no text of the article.
    """
    literals: list[str] = []
    text = "".join(_elements(MARKS.sub("", wikitext), literals))
    text = _brackets(text, dropped)
    text = EMPTIED.sub(lambda found: "" if GAP in found[0] else found[0], text).replace(GAP, "")
    text = EXTERNAL.sub(r"\1", text)
    text = TAG.sub(_tag, text)
    text = SWITCH.sub("", QUOTES.sub("", text))
    text = HEADING.sub(lambda found: found[1].strip(" \t"), text)
    text = LIST_MARKS.sub("", RULER.sub("", text))
    text = MARKS.sub(lambda found: found[0] if found[0] in (LITERAL, END) else "", html.unescape(text))
    text = LITERALS.sub(lambda found: literals[int(found[1])], text)
    return EMPTY_LINES.sub("\n\n", SPACE_BEFORE_LINE_END.sub("", text)).strip("\n ")


def _elements(text: str, literals: list[str]) -> Iterator[str]:
    """Yield the text without comments and dropped elements; verbatim content is replaced by its number in `literals`."""
    position = 0
    missing: set[str] = set()  # elements without a further end tag
    while (opened := ELEMENT.search(text, position)) is not None:
        yield text[position : opened.start()]
        position = opened.end()
        name = (opened[1] or "!--").lower()
        if (opened[2] or "").endswith("/"):
            continue
        closed = None if name in missing else CLOSE[name].search(text, position)
        if closed is None:
            missing.add(name)
            continue
        content = text[position : closed.start()]
        position = closed.end()
        if name == "nowiki" or name in VERBATIM:
            literals.append(html.unescape(content) if name in ("nowiki", "pre") else content)
            mark = f"{LITERAL}{len(literals) - 1}{END}"
            yield f"\n{mark}\n" if "\n" in content and name != "nowiki" else mark
    yield text[position:]


def _tag(found: re.Match[str]) -> str:
    attributes = (found[2] or "").strip(" \t\n/")
    if attributes and "=" not in attributes:
        return found[0]  # "a <b and c> d"
    return "\n" if found[1] else ""


class _Frame:
    """An open bracket: "{{", "[[" or "{|" ("" for the page), and the text since."""

    def __init__(self, kind: str, n_braces: int = 0) -> None:
        self.kind, self.n_braces = kind, n_braces
        self.pieces: list[str] = []


def _brackets(text: str, dropped: Collection[str]) -> str:
    """Return the text with links, templates and tables replaced by what they show."""
    stack = [_Frame("")]
    position = 0
    for found in BRACKET.finditer(text):
        stack[-1].pieces.append(text[position : found.start()])
        position = found.end()
        token = found[0]
        if token[0] == "}":
            _close_braces(stack, len(token))
        elif token in ("]]", "|}"):
            _close(stack, "[[" if token == "]]" else "{|", dropped)
        elif len(stack) < MAX_DEPTH:
            is_template = token.startswith("{{")
            stack.append(_Frame("{{" if is_template else token, len(token) if is_template else 0))
    stack[-1].pieces.append(text[position:])
    _flush(stack, 0)
    return "".join(stack[0].pieces)


def _flush(stack: list[_Frame], depth: int) -> None:
    """Move the text of the frames above `depth`, which have no end, into that frame."""
    pieces = [piece for frame in stack[depth + 1 :] for piece in frame.pieces]
    del stack[depth + 1 :]
    stack[depth].pieces += pieces


def _close_braces(stack: list[_Frame], count: int) -> None:
    """Close templates and parameters with a run of `count` braces."""
    while count >= 2:
        depth = next((d for d in range(len(stack) - 1, 0, -1) if stack[d].kind == "{{"), 0)
        if not depth:
            return
        _flush(stack, depth)
        frame = stack[depth]
        used = 3 if min(count, frame.n_braces) >= 3 else 2
        count -= used
        frame.n_braces -= used
        shown = _template("".join(frame.pieces))
        frame.pieces = [shown]
        if frame.n_braces < 2:
            stack.pop()
            stack[-1].pieces.append(shown)


def _close(stack: list[_Frame], kind: str, dropped: Collection[str]) -> None:
    """Close the nearest link or table, which no template separates from its end."""
    for depth in range(len(stack) - 1, 0, -1):
        if stack[depth].kind == kind:
            _flush(stack, depth)
            content = "".join(stack.pop().pieces)
            stack[-1].pieces.append(_table(content) if kind == "{|" else _link(content, dropped))
            return
        if kind == "[[" and stack[depth].kind == "{{":
            return


def _template(content: str) -> str:
    """Return what a template shows: an argument, or GAP."""
    name, *arguments = content.split("|")
    number = KEPT_ARGUMENT.get(name.strip().lower().replace("_", " "))
    if number is None:
        return GAP
    named = dict(a.split("=", 1) for a in arguments if re.match(r"\s*\d+\s*=", a))
    unnamed = [a for a in arguments if not re.match(r"\s*\w+\s*=", a)]
    shown = {key.strip(): value for key, value in named.items()}.get(str(number))
    return (shown if shown is not None else (unnamed[number - 1 : number] or [""])[0]).strip() or GAP


def _link(content: str, dropped: Collection[str]) -> str:
    target, separator, label = content.partition("|")
    if "\n" in target:
        return content
    prefix, colon, _ = target.partition(":")
    if colon and prefix.strip().lower() in dropped:
        return GAP
    target = target.strip().removeprefix(":")
    if not separator:
        return target
    # The pipe trick: [[Mercury (planet)|]] shows "Mercury".
    return label if label.strip() else target.partition(" (")[0]


def _table(content: str) -> str:
    """Return the rows as lines, their cells separated by tabs. The first line holds attributes."""
    rows: list[list[str]] = [[]]
    for line in content.split("\n")[1:]:
        start = line.lstrip()
        if start.startswith("|-"):
            rows.append([])
        elif start.startswith("|+"):
            rows += [[_cell(start[2:])], []]
        elif start.startswith(("|", "!")):
            cells = re.split(r"\|\||!!" if start[0] == "!" else r"\|\|", start[1:])
            rows[-1] += map(_cell, cells)
        elif rows[-1]:
            rows[-1][-1] = f"{rows[-1][-1]} {start}".strip()
        elif start:
            rows[-1].append(start)
    return "\n" + "\n".join("\t".join(row) for row in rows if row) + "\n"


def _cell(text: str) -> str:
    """Return a cell without its attributes (`style="..." | text`)."""
    attributes, separator, rest = text.partition("|")
    return (rest if separator and "=" in attributes else text).strip()
