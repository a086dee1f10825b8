"""Check the project's prose: banned words, sentences of more than 35 words, Markdown lines of more than 140 characters.

Checked are docstrings, comments and message strings of Python; comments and texts of JavaScript, HTML, C++ and CSS; comments
and descriptions of recipes; Markdown. A message string is a literal with a space that is an argument of `raise`, of a call
that prints, logs or warns, or of `help=`. Inline code, code blocks, links, quotations and other literals are left out.

`words_allowed.json` holds the number of hits that are still accepted in each file. `test_words.py` fails when a number
grows, and when a file has no hits left but is still listed. The script imports no module of the package.

    python tests/house/words.py                          # files with more hits than accepted; exit code 1 if there are any
    python tests/house/words.py --list src/whorl/train   # every hit in these files or folders, with its line
    python tests/house/words.py --total                  # hits by rule, and the files with the most
    python tests/house/words.py --rules                  # the rules, each with what to write instead
    python tests/house/words.py --write                  # rewrite words_allowed.json with today's numbers
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("words_allowed.json")
FOLDERS = ("src", "bench", "docs", "studies", "tools")
SUFFIXES = (".py", ".md", ".toml", ".js", ".html", ".css", ".cpp", ".h")
SENTENCE_WORDS, LINE_LENGTH = 35, 140
LONG_SENTENCE, LONG_LINE = "long sentence", "long line"

# Rule -> (regular expression, what to write instead). Matched without case, on prose whose inline code is blanked.
BANNED = {
    # Programs do not talk.
    "tell": (r"tells?|told|telling", "passed, reported, logged, distinguishes"),
    "say": (r"says?|said|saying", "states, returns, reports, unless stated otherwise"),
    "ask": (r"asks?|asked|asking", "requests, calls, requested"),
    "know": (r"knows?|knew", "has, supports, is independent of"),
    "hear": (r"hears?|heard|hearing", "receives, is notified of"),
    "speak": (r"speaks?|spoken|speaking|spoke", "uses, implements, generates"),
    "think": (r"thinks?|believes?|believed|opinions?", "estimates, predicts"),
    "want": (r"(?<!\bwho )(?<!\busers )(?<!\buser )(?<!\byou )(?:wants?|wanted|wish(?:es|ed)?)",
             "requires, requested, desired"),
    "promise": (r"promised?|promises", "SLO, guarantee, guarantees"),
    "remember": (r"remembers?|remembered|forgets|forgot|forgotten", "stores, keeps, drops"),
    "guess": (r"guess|guesses|guessed|c[ao]mes? true", "draft token, estimate, accepted"),
    "teach": (r"taught|teaches|lessons?", "trained on, training data"),
    "learnt": (r"(?:un)?learnt", "trained, learned"),
    "judged": (r"judged|judges", "scored, checked, evaluates"),
    "look": (r"(?:look|looks|looked|looking) (?:at|after|twice)|a look", "reads, checks, inspects, evaluation"),
    # Pronouns that hide the noun.
    "nobody": (r"nobody|somebody|everybody|whoever|whomever|whom", "name the caller, the user or the component"),
    "theirs": (r"theirs|hers|(?:of|is|are|than|as) (?:mine|ours|yours)", "name the owner"),
    "whatever": (r"whatever|wherever", "any, regardless of, everywhere"),
    "who": (r"(?:those|all|one|ones|anyone|of|knows|see) who|who (?:is|are|gets|goes|weighs|sees|uses|samples|scores|trains"
            r"|reads|writes|waits|else|comes|chooses|learns|acts|answers|calls)(?<!users who are)", "name the component"),
    "those whose": (r"(?:those|ones?|that|all|things?) whose", "name the noun: requests whose"),
    "of its own": (r"of (?:its|their|one's|his|our) own|of (?:an|no) own", "separate, own, individual"),
    # Noun clauses in place of a noun.
    "is what": (r"(?:is|are|was|were) what", "is the + noun"),
    "what there is": (r"what there is|what is there|there is none|so there is", "the existing, the available; none exists"),
    "as they are": (r"as (?:they|it) (?:is|are|was|were)(?= ?(?:[.,;:)]|$))", "unchanged"),
    # Invented and archaic words.
    "anew": (r"anew|afresh", "again, recomputed"),
    "alike": (r"alike", "equal, the same on all, identical"),
    "beside": (r"besides?", "next to, with, in addition to, compared with"),
    "aside": (r"aside|to one side", "to a temporary file, in quarantine, separately"),
    "apart": (r"(?:keep|keeps|kept|tell|tells|told|take|taken|hold|held|are|is|parts) (?:\w+ )?apart",
              "separate, distinguish"),
    "stand": (r"(?:stand|stands|stood|standing)(?! for\b|alone)", "is, is in, is listed in, stays"),
    "go on": (r"(?:go|goes|going|went|gone) (?:on|by|over|without|its own|up to|for)", "continues, uses, is identified by"),
    "for nothing": (r"for nothing|comes free", "without cost"),
    "by itself": (r"by (?:itself|themselves)", "automatically, separately"),
    "nothing of": (r"nothing (?:of|but|here)|of which nothing", "no + noun, only"),
    "of before": (r"(?:of|from) before|the (?:one|ones|step|state) before", "previous, earlier"),
    "on its way": (r"on (?:its|their|the) way", "in transit, during"),
    "at hand": (r"(?:at|in) hand|hands (?:on|out)|handed (?:on|out)", "available, held, passes"),
    "be it": (r"be it|be they|come what may", "whether it is"),
    "lend": (r"lends?|lent|borrows?", "shares, provides"),
    # Private vocabulary.
    "house": (r"houses?|of the house", "project, Whorl, built-in"),
    "floor": (r"floors(?! division)|floor (?:below|above|of the)|(?:one|same|lower|upper) floor", "layer"),
    "ground": (r"the ground(?! truth)|from the ground up", "lowest layer"),
    "books": (r"(?:the |their |its |a )?books", "block tables, counters, bookkeeping"),
    "stranger": (r"strangers?|witness(?:es)?|scribes?|vigil|keepers?|the pulse|tolls?|seats?",
                 "the term of the renamed module"),
    "the fall": (r"(?:the|a|mark of the) fall", "loss drop, induction onset"),
    "on a string": (r"on a string", "controlled by the test"),
}  # fmt: skip
# Rules that hold at the start of a sentence; a question is exempt.
OPENINGS = {
    "What ...": (r"what(?! (?:if|about)\b)", "start with the noun: 'The state', 'Returns the ...'"),
    "Who ...": (r"whose|who", "start with the noun"),
}
BANNED_ANY = re.compile("|".join(f"(?P<r{i}>{p})" for i, (p, _) in enumerate(BANNED.values())), re.IGNORECASE)
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


# ---------------------------------------------------------------------------------------------------------------------
# Text -> paragraphs

CODE = re.compile(r"(`+)(.+?)\1|\"[^\"]{1,160}\"", re.DOTALL)  # inline code, quotation
LINK = re.compile(r"\]\([^)\s]*\)|https?://\S+")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)]) ")
ENTRY = re.compile(r"\s*[\w*][\w.*, \[\]]{0,40}: ")
HEADER = re.compile(r"\s*[A-Z][A-Za-z ]{0,30}:\s*$")
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
        columns = bool(COLUMNS.search(text.strip()))
        entry = bool(ITEM.match(text) or ENTRY.match(text) or HEADER.match(text))
        continued = (
            not entry and not columns and current.sentences and (depth == indent or len(current.lines) == 1)
        )
        if current.lines and not (stripped and continued):
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
    tree = ast.parse(text)
    source = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstring(node, source)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from messages((*node.exc.args, *(k.value for k in node.exc.keywords)))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in MESSAGE_CALLS:
                yield from messages(node.args)
            if not name[:1].isupper() or name in ("Option", "Argument", "Field", "ArgumentParser"):
                yield from messages(k.value for k in node.keywords if k.arg in MESSAGE_KEYWORDS)
    yield from comments(text)


def docstring(node: ast.AST, source: Sequence[str]) -> Iterator[Paragraph]:
    """Paragraphs of the docstring of a module, class or function."""
    body = getattr(node, "body", [])
    if not body or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Constant):
        return
    literal = body[0].value
    if not isinstance(literal.value, str):
        return
    first, last = literal.lineno, literal.end_lineno or literal.lineno
    lines = [(n, source[n - 1]) for n in range(first, last + 1)]
    margin = " " * literal.col_offset
    lines[0] = (first, margin + re.sub(r'^[rRuU]?("""|\'\'\'|"|\')', "", lines[0][1].lstrip()))
    lines[-1] = (last, re.sub(r'("""|\'\'\'|"|\')\s*$', "", lines[-1][1]))
    yield from paragraphs(lines)


def messages(nodes: Iterable[ast.expr]) -> Iterator[Paragraph]:
    """String literals with a space among `nodes`; a replacement field of an f-string becomes an underscore."""
    for node in nodes:
        pending: list[ast.AST] = [node]
        while pending:
            at = pending.pop()
            text = ""
            if isinstance(at, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "_" for p in at.values]
                text = "".join(parts)
            elif isinstance(at, ast.Constant):
                text = at.value if isinstance(at.value, str) else ""
            elif not isinstance(at, ast.Call | ast.Lambda):
                pending.extend(ast.iter_child_nodes(at))
            if " " in text.strip():
                number = getattr(at, "lineno", 1)
                yield Paragraph([(number, line) for line in text.splitlines() if line.strip()])


def comments(text: str) -> Iterator[Paragraph]:
    """Comments of a Python file; comments on consecutive lines in the same column are one text."""
    block: list[tuple[int, str]] = []
    last = (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        body = token.string.lstrip("#:")
        if re.match(r"\s*(?:noqa|type:|fmt:|pragma|pylint|ruff)", body):
            continue
        if (row - 1, column) != last and block:
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
    block: list[tuple[int, str]] = []
    for match in SCRIPT.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if match.lastgroup == "line" and suffix != ".css":
            if block and block[-1][0] != number - 1:
                yield from paragraphs(block)
                block = []
            block.append((number, match.group()[2:]))
        elif match.lastgroup == "block":
            body = match.group()[2:-2].split("\n")
            yield from paragraphs((number + i, re.sub(r"^\s*\*+ ?", "", line)) for i, line in enumerate(body))
        elif match.lastgroup == "text" and suffix == ".js":
            body_text = re.sub(r"\$\{[^}]*\}", "_", match.group()[1:-1])
            if len(re.findall(r"[A-Za-z]{2,} ", body_text + " ")) > 2 and not body_text.startswith(
                ("<", "M ", "--")
            ):
                yield Paragraph([(number, body_text)])
    yield from paragraphs(block)


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
            first = self.getpos()[0]
            self.found += paragraphs((first + i, line) for i, line in enumerate(data.split("\n")))


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


# ---------------------------------------------------------------------------------------------------------------------
# Paragraphs -> hits

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
    starts = [0]
    for _, line in paragraph.lines:
        starts.append(starts[-1] + len(line) + 1)

    def line_of(offset: int) -> int:
        at = next(i for i, start in enumerate(starts[1:]) if offset < start)
        return paragraph.lines[at][0]

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
        words = [w for w in sentence.split() if re.search(r"[A-Za-z0-9_]", w)]
        if len(words) > SENTENCE_WORDS:
            yield Hit(line_of(offset), LONG_SENTENCE, f"{len(words)} words: {shown[:60]}...")


def long_lines(text: str) -> Iterator[Hit]:
    """Markdown lines of more than 140 characters, without tables, code blocks and lines that hold a link."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
        if (
            not fence
            and len(line) > LINE_LENGTH
            and not re.match(r"\s*\||    ", line)
            and not LINK.search(line)
        ):
            yield Hit(number, LONG_LINE, f"{len(line)} characters")


def hits(path: str, text: str) -> list[Hit]:
    """All findings in a file, by line."""
    found = [hit for paragraph in prose(path, text) for hit in check(paragraph)]
    if path.endswith(".md"):
        found += long_lines(text)
    return sorted(found, key=lambda hit: (hit.line, hit.rule, hit.text))


# ---------------------------------------------------------------------------------------------------------------------
# Files and the list of accepted numbers


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


def read_allowed(path: Path = ALLOWED) -> dict[str, int]:
    """Accepted number of findings by file."""
    allowed: dict[str, int] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return allowed


def compare(found: dict[str, list[Hit]], allowed: dict[str, int]) -> list[str]:
    """Messages for each file with more findings than accepted, and for each listed file that has none."""
    errors = [
        f"{path}: {len(one)} findings, {allowed.get(path, 0)} accepted; `python tests/house/words.py --list {path}`"
        for path, one in found.items()
        if len(one) > allowed.get(path, 0)
    ]
    errors += [
        f"{path}: listed without findings; `python tests/house/words.py --write`"
        for path in allowed
        if path not in found
    ]
    return errors


def write(found: dict[str, list[Hit]], allowed: dict[str, int]) -> None:
    """Store today's numbers, and print those that grew."""
    numbers = {path: len(one) for path, one in sorted(found.items())}
    ALLOWED.write_text(json.dumps(numbers, indent=0, ensure_ascii=False) + "\n", "utf-8")
    for path, number in numbers.items():
        if allowed and number > allowed.get(path, 0):
            print(f"grew: {path} {allowed.get(path, 0)} -> {number}")
    print(f"{sum(numbers.values())} findings in {len(numbers)} files (were {sum(allowed.values())})")


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
        "--list", nargs="+", metavar="PATH", help="print every finding in these files or folders"
    )
    parser.add_argument("--total", action="store_true", help="print the findings by rule and by file")
    parser.add_argument("--rules", action="store_true", help="print the rules")
    parser.add_argument(
        "--write", action="store_true", help="rewrite words_allowed.json with today's numbers"
    )
    given = parser.parse_args()
    if given.rules:
        for rule, (pattern, instead) in {**BANNED, **OPENINGS}.items():
            print(f"{rule:<14} {instead}\n{'':<14} {pattern}")
        return 0
    if given.list:
        places = [
            str(Path(p).resolve().relative_to(ROOT)) if Path(p).exists() else p for p in map(str, given.list)
        ]
        found = count(places=places)
        for path, one in found.items():
            print(*(f"{path}:{hit.line}: {hit.rule}: {hit.text}" for hit in one), sep="\n")
        number = sum(len(one) for one in found.values())
        print(f"{number} findings in {len(found)} files")
        return int(number > 0)
    found, allowed = count(), read_allowed()
    if given.write:
        write(found, allowed)
        return 0
    if given.total:
        total(found)
        return 0
    if errors := compare(found, allowed):
        print(*errors, sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
