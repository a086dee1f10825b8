"""Check the project's prose: banned words, sentences of more than 35 words, Markdown lines of more than 140 characters.

Checked are docstrings, comments and message strings of Python; comments and texts of JavaScript, HTML, C++ and CSS; comments
and descriptions of recipes; Markdown. A message string is a literal with a space that is an argument of `raise`, of a call
that prints, logs or warns, or of `help=`. Inline code, code blocks, links, quotations and other literals are left out.

The script imports no module of the package and no installed one.

    python tools/lint/words.py                          # every finding with its line; exit code 1 if there are any
    python tools/lint/words.py --list src/whorl/train   # the findings in these files or folders
    python tools/lint/words.py --total                  # the findings by rule, and the files with the most
    python tools/lint/words.py --rules                  # the rules, each with what to write instead
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "bench", "docs", "studies", "tools")
SUFFIXES = (".py", ".md", ".toml", ".js", ".html", ".css", ".cpp", ".h")
SENTENCE_WORDS, LINE_LENGTH = 35, 140
LONG_SENTENCE, LONG_LINE = "long sentence", "long line"

RULES = tomllib.loads(Path(__file__).with_name("word_rules.toml").read_text("utf-8"))
BANNED, OPENINGS = RULES["banned"], RULES["openings"]
BANNED_ANY = re.compile(rf"\b(?:{'|'.join(pattern for pattern, _ in BANNED.values())})", re.IGNORECASE)
EACH = {rule: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for rule, (pattern, _) in BANNED.items()}
OPEN = {rule: re.compile(rf"(?:{pattern})\b", re.IGNORECASE) for rule, (pattern, _) in OPENINGS.items()}

MESSAGE_CALLS = frozenset(
    {"print", "say", "echo", "secho", "warn", "warning", "info", "error", "debug", "exception", "critical"}
    | {"log", "fail", "note", "exit"}
)
MESSAGE_KEYWORDS = frozenset(("help", "description", "epilog", "do", "hint", "title", "label"))


@dataclass(frozen=True)
class Hit:
    """One finding: 1-based line, the rule's name, and the text that was found."""

    line: int
    rule: str
    text: str


@dataclass
class Paragraph:
    """Consecutive lines of prose as (line number, text). `sentences`: whether their length and opening are checked."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    sentences: bool = True


CODE = re.compile(r"(`+)(.+?)\1|\"[^\"]{1,160}\"", re.DOTALL)  # inline code, quotation
LINK = re.compile(r"\]\([^)\s]*\)|https?://\S+")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]) ")
ENTRY = re.compile(r"\s*[\w*][\w.*, \[\]]{0,40}: ")
HEADER = re.compile(r"\s*[A-Z][A-Za-z ]{0,30}:\s*$")
FOR_TOOLS = re.compile(r"\s*(?:noqa|type:|fmt:|pragma|pylint|ruff)")
COLUMNS = re.compile(r"\S(?: {3,}|\t)\S|  -> |\|.*\|")


def blank(match: re.Match[str]) -> str:
    """A filler of the same length, so that offsets stay. Inline code and a quotation count as one word each."""
    return "_" * len(match.group())


def paragraphs(lines: Iterable[tuple[int, str]]) -> Iterator[Paragraph]:
    """Split docstring or comment lines at blank lines, list items, entries of a section, and changes of indentation.

    A line with columns (a table, a diagram, an aligned example) is a paragraph that is checked for words only.
    """
    current = Paragraph()
    indent = 0
    for number, text in lines:
        stripped = text.strip()
        depth = len(text) - len(text.lstrip())
        columns = bool(COLUMNS.search(stripped))
        entry = bool(ITEM.match(text) or ENTRY.match(text) or HEADER.match(text))
        aligned = current.sentences and (depth == indent or len(current.lines) == 1)
        if current.lines and not (stripped and aligned and not entry and not columns):
            yield current
            current = Paragraph()
        if stripped:
            current.lines.append((number, stripped))
            current.sentences = not columns
            indent = depth
    if current.lines:
        yield current


def python_prose(text: str) -> Iterator[Paragraph]:
    """Docstrings, comments and message strings of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if literal := ast.get_docstring(node, clean=False):
                start = node.body[0]
                lines = f"{' ' * start.col_offset}{literal}".split("\n")
                yield from paragraphs(enumerate(lines, start.lineno))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from messages((*node.exc.args, *(k.value for k in node.exc.keywords)))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in MESSAGE_CALLS:
                yield from messages(node.args)
            if not name[:1].isupper() or name in ("Option", "Argument", "Field", "ArgumentParser"):
                yield from messages(k.value for k in node.keywords if k.arg in MESSAGE_KEYWORDS)
    yield from joined(comments(text))


def messages(nodes: Iterable[ast.AST]) -> Iterator[Paragraph]:
    """String literals with a space, outside nested calls; a field of an f-string becomes an underscore."""
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "_" for p in node.values)
        elif isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
        elif not isinstance(node, ast.Call | ast.Lambda):
            yield from messages(ast.iter_child_nodes(node))
        if " " in text.strip():
            yield Paragraph([(node.lineno, line) for line in text.splitlines() if line.strip()])


STRING_OR_COMMENT = re.compile(
    r"""(\"{3}|'{3})(?:\\.|.)*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""", re.DOTALL
)


def comments(text: str) -> Iterator[tuple[int, int, str]]:
    """Comments of a Python file as (line, column, text), without those for tools. `tokenize` is ten times as slow."""
    line, start = 1, 0  # number and offset of the line of the last comment
    for match in STRING_OR_COMMENT.finditer(text):
        body = match.group().lstrip("#:")
        if match.group()[0] == "#" and not FOR_TOOLS.match(body):
            at = match.start()
            line, start = line + text.count("\n", start, at), text.rfind("\n", 0, at) + 1
            yield line, at - start, body


def joined(found: Iterable[tuple[int, int, str]]) -> Iterator[Paragraph]:
    """Paragraphs of comments (line, column, text); those on consecutive lines in the same column are one text."""
    block: list[tuple[int, str]] = []
    last = (-1, -1)
    for row, column, body in found:
        if (row - 1, column) != last:
            yield from paragraphs(block)
            block = []
        block.append((row, body))
        last = (row, column)
    yield from paragraphs(block)


def markdown_prose(text: str) -> Iterator[Paragraph]:
    """Paragraphs of a Markdown file without code blocks; a table's row is checked for words only."""
    current = Paragraph()
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        opening = re.match(r"(```+|~~~+)", stripped)
        indented = line.startswith("    ") and not current.lines
        if opening and not fence:
            fence = opening.group()
        elif fence:
            fence = "" if stripped.startswith(fence) else fence
            continue
        table, heading = stripped.startswith("|"), stripped.startswith("#")
        if current.lines and (opening or not stripped or table or heading or ITEM.match(line)):
            yield current
            current = Paragraph()
        if stripped and not opening and not indented:
            if table or heading:
                yield Paragraph([(number, stripped)], sentences=False)
            else:
                current.lines.append((number, stripped))
    if current.lines:
        yield current


SCRIPT = re.compile(
    r"""(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)"""
    r"""|(?P<regex>(?<=[=(,:!&|?;{])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\\\n])+/)""",
    re.DOTALL,
)


def script_prose(text: str, suffix: str) -> Iterator[Paragraph]:
    """Comments of JavaScript, C++ or CSS; of JavaScript also the string literals of three words or more."""
    line_comments = []
    for match in SCRIPT.finditer(text):
        number, found = text.count("\n", 0, match.start()) + 1, match.group()
        if match.lastgroup == "line" and suffix != ".css":
            line_comments.append((number, 0, found[2:]))
        elif match.lastgroup == "block":
            lines = (re.sub(r"^\s*\*+ ?", "", line) for line in found[2:-2].split("\n"))
            yield from paragraphs(enumerate(lines, number))
        elif match.lastgroup == "text" and suffix == ".js":
            literal = re.sub(r"\$\{[^}]*\}", "_", found[1:-1])
            is_prose = len(re.findall(r"[A-Za-z]{2,} ", literal + " ")) > 2
            if is_prose and not literal.startswith(("<", "M ", "--")):
                yield Paragraph([(number, literal)])
    yield from joined(line_comments)


class Page(HTMLParser):
    """Texts of an HTML file, outside scripts and styles, with the attributes that a user reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Paragraph] = []
        self.skipped = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipped = tag if tag in ("script", "style") else ""
        for name, value in attrs:
            if name in ("title", "aria-label", "placeholder", "alt", "content") and value and " " in value:
                self.found.append(Paragraph([(self.getpos()[0], value)]))

    def handle_endtag(self, tag: str) -> None:
        self.skipped = ""

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.found += paragraphs(enumerate(data.split("\n"), self.getpos()[0]))


def recipe_prose(text: str) -> Iterator[Paragraph]:
    """Comments and `about`, `title` and `description` values of a TOML file."""
    for number, line in enumerate(text.splitlines(), 1):
        described = re.match(r"\s*(?:about|title|description)\s*=\s*\"(.*)\"", line)
        comment = re.search(r"(?:^|\s)#(.*)", re.sub(r'"[^"]*"', "", line))
        for match in (described, comment):
            if match and match.group(1).strip():
                yield Paragraph([(number, match.group(1).strip())])


def prose(path: str, text: str) -> Iterator[Paragraph]:
    """The paragraphs of a file, by its suffix.

    Raises:
        SyntaxError: a Python file cannot be parsed.
    """
    suffix = Path(path).suffix
    if suffix == ".py":
        yield from python_prose(text)
    elif suffix == ".md":
        yield from markdown_prose(text)
    elif suffix == ".toml":
        yield from recipe_prose(text)
    elif suffix == ".html":
        page = Page()
        page.feed(text)
        yield from page.found
    else:
        yield from script_prose(text, suffix)


SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*]*[A-Z0-9`_])")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|al|eq|eqs|fig|sec|no|approx|resp|incl)\.$", re.IGNORECASE)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Sentences of a paragraph with their offsets. An abbreviation such as `e.g.` ends none."""
    start = 0
    for match in SENTENCE.finditer(text):
        if not ABBREVIATION.search(text[start : match.start()]):
            yield start, text[start : match.start()]
            start = match.end()
    if text[start:].strip():
        yield start, text[start:]


def check(paragraph: Paragraph) -> Iterator[Hit]:
    """Banned words in a paragraph, and the length and opening of its sentences."""
    text = " ".join(line for _, line in paragraph.lines)
    ends = list(accumulate(len(line) + 1 for _, line in paragraph.lines))

    def line_of(offset: int) -> int:
        return paragraph.lines[bisect_right(ends, offset)][0]

    plain = LINK.sub(blank, CODE.sub(blank, text))
    if BANNED_ANY.search(plain):
        for rule, pattern in EACH.items():
            for match in pattern.finditer(plain):
                near = text[max(0, match.start() - 30) : match.end() + 30]
                yield Hit(line_of(match.start()), rule, f"[{match.group()}] ...{near}...")
    if not paragraph.sentences:
        return
    for offset, sentence in sentences(plain):
        shown = text[offset : offset + len(sentence)]
        lead = len(sentence) - len(sentence.lstrip(" -*+\"'(["))
        for rule, pattern in OPEN.items():
            if pattern.match(sentence, lead) and not sentence.rstrip().endswith("?"):
                yield Hit(line_of(offset), rule, shown[:70])
        words = sentence.split()
        if len(words) > SENTENCE_WORDS:
            length = sum(bool(re.search(r"[A-Za-z0-9_]", w)) for w in words)
            if length > SENTENCE_WORDS:
                yield Hit(line_of(offset), LONG_SENTENCE, f"{length} words: {shown[:60]}...")


def long_lines(text: str) -> Iterator[Hit]:
    """Markdown lines of more than 140 characters, without tables, code blocks and lines that hold a link."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
        exempt = fence or re.match(r"\s*\||    ", line) or LINK.search(line)
        if len(line) > LINE_LENGTH and not exempt:
            yield Hit(number, LONG_LINE, f"{len(line)} characters")


def hits(path: str, text: str) -> list[Hit]:
    """All findings in a file, by line."""
    found = [hit for paragraph in prose(path, text) for hit in check(paragraph)]
    if path.endswith(".md"):
        found += long_lines(text)
    return sorted(found, key=lambda hit: (hit.line, hit.rule, hit.text))


def files(root: Path, places: Sequence[str] = ()) -> Iterator[str]:
    """Paths of the checked files relative to `root`: of all, or of the files and folders in `places`.

    Raises:
        FileNotFoundError: a place does not exist.
    """
    if not places:
        yield from sorted(p.name for p in root.glob("*.md"))
    for place in places or [f for f in FOLDERS if (root / f).is_dir()]:
        start = root / place
        if not start.exists():
            raise FileNotFoundError(f"{start} does not exist; give a file or folder relative to {root}")
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            parts = path.relative_to(root).parts
            hidden = any(p.startswith(".") or p == "__pycache__" or p.endswith(".egg-info") for p in parts)
            if path.suffix in SUFFIXES and not hidden and path.is_file():
                yield path.relative_to(root).as_posix()


def count(root: Path = ROOT, places: Sequence[str] = ()) -> dict[str, list[Hit]]:
    """Findings of each checked file that has some."""
    found = {path: hits(path, (root / path).read_text("utf-8")) for path in files(root, places)}
    return {path: one for path, one in found.items() if one}


def listing(found: dict[str, list[Hit]]) -> list[str]:
    """One line for each finding, and the numbers of findings and files."""
    shown = [f"{path}:{hit.line}: {hit.rule}: {hit.text}" for path, one in found.items() for hit in one]
    return [*shown, f"{len(shown)} findings in {len(found)} files"]


def total(found: dict[str, list[Hit]]) -> None:
    """Print the findings by rule and the thirty files with the most."""
    by_rule = Counter(hit.rule for one in found.values() for hit in one)
    by_file = Counter({path: len(one) for path, one in found.items()})
    print(*(f"{number:>6}  {rule}" for rule, number in by_rule.most_common()), sep="\n")
    print(*(f"{number:>6}  {path}" for path, number in by_file.most_common(30)), sep="\n")
    print(f"{by_rule.total():>6}  in {len(found)} files")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--list", nargs="+", default=[], metavar="PATH", help="check only these files or folders"
    )
    parser.add_argument("--total", action="store_true", help="print the findings by rule and by file")
    parser.add_argument("--rules", action="store_true", help="print the rules")
    given = parser.parse_args()
    if given.rules:
        for rule, (pattern, instead) in {**BANNED, **OPENINGS}.items():
            print(f"{rule:<14} {instead}\n{'':<14} {pattern}")
        return 0
    places = [str(Path(p).resolve().relative_to(ROOT)) if Path(p).exists() else p for p in given.list]
    found = count(places=places)
    if given.total:
        total(found)
        return 0
    print(*listing(found), sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
