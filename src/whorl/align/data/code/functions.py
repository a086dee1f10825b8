"""Functions out of Python source: each with a docstring that says what is wanted, and a body that does it.

A folder of code is a folder of exercises: signature and docstring ask, the body answers. `functions` finds them with
`ast` (nothing is imported or run) and cuts each in two,

    header   decorators, signature and docstring, as they stand in the file, moved to the left margin
    body     what follows, up to the function's last line

and header + body is, character for character, a function that parses. The same functions give instruction pairs (here),
tasks with doctests and with a compiler as judge (`mine_tasks.py`), and preference pairs (`mine_broken.py`).

The subtle part is which functions one may learn from and be asked about. Libraries carry copies of each other's code, so
a function whose name and body (as a tree, blind to layout) were seen before is left out; and whether a file trains or
tests is a hash of its path, so that no file does both, and a file keeps its side as others come and go. Which copy stays,
and the order of what is returned, are hashes of the seed: the first n functions are a sample of all.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from whorl.align.data.formats import Conversation, PromptCompletion
from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document
from whorl.corpus.readers import read_documents
from whorl.corpus.sources import list_files

SplitName = Literal["train", "test"]
SourceText = tuple[str, str]  # its path, its text
REQUEST = "Complete this Python function."


@dataclass(frozen=True)
class PythonFunction:
    """A function with a docstring, cut after it.

    Attributes:
        file, line, name: where it stands, and what it is called.
        header, body: see the top of this file; both end with a line break.
        docstring: as `inspect.cleandoc` has it.
        is_top: whether it stands at the file's top level, so that it can be run without a class.
    """

    file: str
    line: int
    name: str
    header: str
    body: str
    docstring: str
    is_top: bool

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.name}"

    def prompt_completion(self) -> PromptCompletion:
        """For a model that continues text: the body follows the header."""
        return PromptCompletion(self.header, self.body, self.file, self.id)

    def conversation(self) -> Conversation:
        """For a model that answers: asked with the header, it says the whole function."""
        asked = {"role": "user", "content": f"{REQUEST}\n\n{self.header}"}
        said = {"role": "assistant", "content": (self.header + self.body).rstrip("\n")}
        return Conversation((asked, said), self.file, self.id)


def python_files(source: str = "python-stdlib", skipped: Counter[str] | None = None) -> Iterator[SourceText]:
    """Python files below a folder, or of the running interpreter's own standard library, in the order of their paths.

    Args:
        source: "python-stdlib", or a folder, file or glob.
        skipped: counts, by reason, of the files that are no text.

    Raises:
        DataError: there is no such source, or no Python in it.
    """
    files, _ = list_files(IngestConfig(sources=[source], include=["*.py"]))
    for file in files:
        for document in read_documents(file, text_field="text", max_bytes=1 << 20):
            if isinstance(document, Document):
                yield document.path, document.text
            elif skipped is not None:
                skipped[document.reason] += 1


def split_of(file: str, test_fraction: float = 0.1) -> SplitName:
    """Whether a file trains or tests. No seed: what was held out once stays so."""
    return "test" if stable_hash("side", file) < test_fraction * 2**64 else "train"


def stable_hash(*names: str | int) -> int:
    """A hash in [0, 2**64), to choose and to put in order by."""
    key = "\0".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


def extract_functions(
    files: Iterable[SourceText],
    *,
    seed: int = 0,
    min_docstring: int = 20,
    body_bytes: tuple[int, int] = (20, 800),
    header_bytes: int = 1600,
    skipped: Counter[str] | None = None,
) -> list[PythonFunction]:
    """Every function that asks and answers, without copies, in an order of the seed's.

    Args:
        files: (path, text) pairs.
        min_docstring: characters; shorter ones say too little to go by.
        body_bytes: least and most of the body; header_bytes: most of the header.
        skipped: counts of what was left out, by reason.
    """
    skipped = Counter() if skipped is None else skipped
    found: list[tuple[int, PythonFunction, str]] = []
    for path, text in files:
        tree = parse_or_none(text)
        if tree is None:
            skipped["does_not_parse"] += 1
            continue
        lines = source_lines(text)
        top = {id(node) for node in tree.body}
        for node in _definitions(tree):
            made = _split_function(path, lines, node, id(node) in top)
            if isinstance(made, str):
                skipped[made] += 1
            elif len(made.docstring) < min_docstring:
                skipped["short_docstring"] += 1
            elif len(made.header.encode()) > header_bytes:
                skipped["long_header"] += 1
            elif not body_bytes[0] <= len(made.body.encode()) <= body_bytes[1]:
                skipped["body_size"] += 1
            else:
                found.append((stable_hash(seed, made.id), made, _body_hash(node)))
    kept: dict[str, PythonFunction] = {}
    for _, function, likeness in sorted(found, key=lambda f: (f[0], f[1].id)):
        if likeness in kept:
            skipped["copy"] += 1
        else:
            kept[likeness] = function
    return list(kept.values())


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, wherever they stand. Only statements are looked at: most of a tree is expressions."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, None)
            if isinstance(inner, list):  # that of a lambda is an expression, and no statement holds one here
                left += inner


def parse_or_none(text: str) -> ast.Module | None:
    """The tree, or None for what is not Python (or is too deep for its parser)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old code has escapes that Python warns of
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def source_lines(text: str) -> list[str]:
    """Lines as `ast` counts them, without their ends; form feeds do not end one."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _split_function(
    path: str, lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, is_top: bool
) -> PythonFunction | str:
    """The function, or why it is left out."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return "no_docstring"
    if len(node.body) < 2 or _is_stub(node.body[1:]):
        return "no_body"
    said, follows = node.body[0], node.body[1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    ends, follows_at = said.end_lineno or 0, follows.lineno
    if isinstance(follows, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and follows.decorator_list:
        follows_at = follows.decorator_list[0].lineno
    if follows_at <= ends:
        return "one_line"
    header = _dedent_lines(lines[first - 1 : ends], node.col_offset)
    body = _dedent_lines(lines[ends : node.end_lineno], node.col_offset)
    if header is None or body is None:
        return "not_indented"
    whole = parse_or_none(header + body)
    if whole is None or len(whole.body) != 1:
        return "not_indented"  # a text of several lines lost its margin, or a semicolon follows
    return PythonFunction(path, first, node.name, header, body, docstring, is_top)


def _dedent_lines(lines: list[str], columns: int) -> str | None:
    """Lines moved to the left margin; None where one does not reach as far in."""
    if any(line[:columns].strip() for line in lines):
        return None
    return "".join(line[columns:] + "\n" for line in lines)


def _is_stub(body: list[ast.stmt]) -> bool:
    """Only pass, ..., or `raise NotImplementedError`."""
    for statement in body:
        if isinstance(statement, ast.Pass):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement):
            continue
        return False
    return True


def _body_hash(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The same for functions of one name and one body, however they are laid out and whatever their docstrings say."""
    dumped = "".join(ast.dump(statement) for statement in node.body[1:])
    return blake2b(f"{node.name}\0{dumped}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
