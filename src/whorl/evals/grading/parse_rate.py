"""Functions to complete, and the metric `parses`: the completion is valid Python.

A held-out file is cut after the header of one of its functions, and the model continues. The continuation is trimmed
where its indentation closes the function. Functions whose real code does not parse by the same rule are not used.

The subtle part is the end. A function ends at a line indented no further than its header, but such a line may also be
inside an open bracket or a triple-quoted string. So these lines are tried in order, and the first prefix that parses is
the function. A later prefix can only parse if the earlier one failed on something open. Text that stops inside the
function, at the generation limit, does not count, so only functions with a short real body are sampled. Parsing is
`ast.parse`: nothing is compiled, imported or run.

The measure does not check behavior: `pass` parses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from whorl.errors import DataError
from whorl.evals.grading.grade import Grade
from whorl.evals.grading.programs import parse_or_none

END_OF_DOCUMENT = b"\n\0"  # an unindented line that no Python file contains


@dataclass(frozen=True)
class FunctionPrompt:
    """A held-out file, cut after a function's header.

    Attributes:
        prefix: the file up to the end of the header, including the line break.
        header: the header without decorators, with its indentation.
        body: the function's real body, from the line after the header to its last line.
        suffix: the rest of the file, needed to find the end of the real function.
        document: the document's id.
        name: the function's name.
    """

    prefix: bytes
    header: bytes
    body: bytes
    suffix: bytes
    document: str
    name: str


def sample_function_prompts(
    documents: Iterable[tuple[str, bytes]],
    n: int,
    seed: int,
    *,
    min_body_bytes: int = 40,
    max_body_bytes: int = 400,
    max_per_document: int = 2,
) -> list[FunctionPrompt]:
    """Choose `n` functions (or all, if there are fewer) from held-out files.

    Args:
        documents: (id, text) pairs; files that are not Python are skipped.
        n: number of prompts, at least 1.
        seed: the same documents and seed give the same prompts in the same order.
        min_body_bytes, max_body_bytes: limits of the real body's size.
        max_per_document: maximum number of prompts per file.

    Raises:
        DataError: no file has a function of that size.
    """
    rng = np.random.default_rng(seed)
    prompts: list[FunctionPrompt] = []
    for document, text in documents:
        # Line breaks as Python reads them: otherwise a file of another system never ends a line.
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        candidates = [
            p
            for p in _find_functions(document, text)
            if min_body_bytes <= len(p.body) <= max_body_bytes
            and trim_to_function(p.header, p.body + p.suffix + END_OF_DOCUMENT) is not None
        ]
        order = rng.permutation(len(candidates))[:max_per_document]
        prompts += [candidates[int(i)] for i in order]
    if not prompts:
        raise DataError(
            "no held-out document has a Python function to complete",
            expected=f"a function whose body has {min_body_bytes} to {max_body_bytes} bytes",
            do="omit this measure for a corpus without Python code, or widen the size limits",
        )
    order = rng.permutation(len(prompts))[:n]
    return [prompts[int(i)] for i in order]


def parses(gold: str, text: str, *, finish: str = "stop") -> Grade:
    """Return the score `parses`: the function, from its header and the text up to its end, is valid Python.

    Args:
        gold: the header. finish: "length" if the limit of tokens cut the text.
    """
    header, completion = gold.encode(), text.encode("utf-8", "replace")
    if finish != "length":
        completion += END_OF_DOCUMENT
    body = trim_to_function(header, completion)
    if body is not None:
        return Grade.of({"parses": 1.0}, "right", "valid Python", body.decode())
    if not _possible_ends(header, completion):
        return Grade.of({"parses": 0.0}, "truncated", "the function does not end within the limit of tokens")
    return Grade.of({"parses": 0.0}, "wrong", "Python does not parse it")


def trim_to_function(header: bytes, completion: bytes) -> bytes | None:
    """Return the completion up to the end of the function if it is valid Python, otherwise None."""
    for end in _possible_ends(header, completion):
        if _parses(header + completion[:end]):
            return completion[:end]
    return None


def _possible_ends(header: bytes, completion: bytes) -> list[int]:
    """Return the byte offsets of the completion's lines that are indented no further than the header."""
    margin = len(header) - len(header.lstrip())
    ends, offset = [], 0
    lines = completion.split(b"\n")
    for line in lines[:-1]:  # the last line may be cut, so its indentation is unknown
        if line.strip() and not line.lstrip().startswith(b"#") and len(line) - len(line.lstrip()) <= margin:
            ends.append(offset)
        offset += len(line) + 1
    last = lines[-1]
    if last[: margin + 1].strip() and not last.lstrip().startswith(b"#"):
        ends.append(offset)  # text within the header's indentation: this line is outside any open function
    return ends


def _parses(source: bytes) -> bool:
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if text[0] in " \t":  # a method: wrap it in a block, since dedenting would change multi-line strings
        text = "if True:\n" + text
    return parse_or_none(text) is not None


def _find_functions(document: str, text: bytes) -> list[FunctionPrompt]:
    """Yield every function of a file whose header ends its line."""
    try:
        tree = parse_or_none(text.decode("utf-8"))
    except UnicodeDecodeError:
        return []
    if tree is None:
        return []
    lines = text.split(b"\n")
    starts = np.concatenate([[0], np.cumsum([len(line) + 1 for line in lines])])
    functions = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        header_start = int(starts[node.lineno - 1])
        # The header ends at the first line after which a body would be accepted (unless a body follows on that line).
        candidates = range(node.lineno - 1, node.body[0].lineno - 1)
        header_line = next((i for i in candidates if _is_header(lines[node.lineno - 1 : i + 1])), None)
        if header_line is None:
            continue  # `def f(): return 1`
        cut, end = int(starts[header_line + 1]), min(int(starts[node.end_lineno]), len(text))
        functions.append(
            FunctionPrompt(text[:cut], text[header_start:cut], text[cut:end], text[end:], document, node.name)
        )
    return functions


def _is_header(lines: list[bytes]) -> bool:
    margin = len(lines[0]) - len(lines[0].lstrip())
    return _parses(b"\n".join([*lines, lines[0][:margin] + b"    pass\n"]))
