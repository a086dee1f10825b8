"""Can the model write a function that Python accepts? A reward that needs no judge.

A held-out file is cut right after the header of one of its functions; the model continues; the
continuation is trimmed where its own indentation closes the function; the share of functions that parse is
the score. The real code, cut and trimmed by the very same rule, stands beside it: if that were not near
100 %, the rule would be at fault and not the model.

The subtle part is the end. A function ends where a line comes back to the header's indentation or further
left, but such a line may also stand inside an open bracket or a triple-quoted string. So every such line
is tried, first to last, and the first prefix that parses is the function: a later prefix can only parse if
the earlier one failed because something was still open, as an error stays an error whatever follows it.
Text that stops inside the function (the generation's limit) did not finish and does not count, which is
why only functions whose real body is short enough are asked for. Parsing is `ast.parse`: nothing is
compiled, imported or run.

What the measure does not say: that the function does what its name promises. (`pass` parses; see
`median_bytes`.)
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from whorl.errors import DataError

END_OF_DOCUMENT = b"\n\0"  # a line within any margin that no Python file has
Generate = Callable[[list[bytes]], list[bytes]]


@dataclass(frozen=True)
class FunctionPrompt:
    """A held-out file, cut after a function's header.

    Attributes:
        prefix: the file from its beginning to the end of the header, the line break included.
        header: the header alone (decorators left out), as it stands in the file, indentation included.
        body: the function's real body, from the line after the header to the function's last line.
        after: what follows the function in the file; with it the real code shows where the function ends.
        document: the document's id.
        name: the function's name.
    """

    prefix: bytes
    header: bytes
    body: bytes
    suffix: bytes
    document: str
    name: str


@dataclass(frozen=True)
class ParseRate:
    """How many completions are functions.

    Attributes:
        n: prompts asked.
        parsed: completions that end and parse.
        unfinished: completions that never came back to the header's indentation (and so did not parse).
        median_bytes: of the bodies that parsed; 0 when none did.
        examples: (prompt, trimmed body or None) in the prompts' order.
    """

    n: int
    parsed: int
    unfinished: int
    median_bytes: float
    examples: tuple[tuple[FunctionPrompt, bytes | None], ...]

    @property
    def rate(self) -> float:
        return self.parsed / self.n


def sample_function_prompts(
    documents: Iterable[tuple[str, bytes]],
    n: int,
    seed: int,
    *,
    min_body_bytes: int = 40,
    max_body_bytes: int = 400,
    max_per_document: int = 2,
) -> list[FunctionPrompt]:
    """Choose `n` functions (fewer if there are not as many) from held-out files.

    Args:
        documents: (id, text) pairs; files that are not Python are passed over.
        n: how many; at least 1.
        seed: the same documents and seed give the same prompts in the same order.
        min_body_bytes, max_body_bytes: of the real body.
        max_per_document: no file may dominate.

    Raises:
        DataError: no file has a function of that size.
    """
    rng = np.random.default_rng(seed)
    found: list[FunctionPrompt] = []
    for document, text in documents:
        # Line breaks as Python sees them; otherwise a file from another system never "ends" a line.
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        here = [p for p in _find_functions(document, text) if min_body_bytes <= len(p.body) <= max_body_bytes]
        order = rng.permutation(len(here))[:max_per_document]
        found += [here[int(i)] for i in order]
    if not found:
        raise DataError(
            "no held-out document has a Python function to complete",
            expected=f"a function whose body has {min_body_bytes} to {max_body_bytes} bytes",
            do="leave this measure out for a corpus without Python code, or widen the sizes",
        )
    order = rng.permutation(len(found))[:n]
    return [found[int(i)] for i in order]


def parse_rate(prompts: Sequence[FunctionPrompt], generate: Generate) -> ParseRate:
    """Share of completions that parse.

    Args:
        prompts: from `prompts`; at least one.
        generate: takes the prefixes (it may keep only the latest part of each) and returns what comes after
            each; one that the model itself ended, and not the limit, is to be closed with `END_OF_DOCUMENT`.

    Raises:
        ValueError: `generate` returned another number of completions.
    """
    completions = generate([prompt.prefix for prompt in prompts])
    if len(completions) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(completions)} completions came back")
    bodies: list[bytes | None] = []
    unfinished = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        bodies.append(trim_to_function(prompt.header, completion))
        unfinished += not _possible_ends(prompt.header, completion)
    sizes = [len(body) for body in bodies if body is not None]
    return ParseRate(
        n=len(prompts),
        parsed=len(sizes),
        unfinished=unfinished,
        median_bytes=float(median(sizes)) if sizes else 0.0,
        examples=tuple(zip(prompts, bodies, strict=True)),
    )


def reference_parse_rate(prompts: Sequence[FunctionPrompt], limit: int = 1_000) -> ParseRate:
    """The same measure on the real continuation, cut after `limit` bytes as a generation would be."""
    rest = [(prompt.body + prompt.suffix + END_OF_DOCUMENT)[:limit] for prompt in prompts]
    return parse_rate(prompts, lambda _: rest)


def trim_to_function(header: bytes, completion: bytes) -> bytes | None:
    """The completion up to the end of the function, if that is Python; else None."""
    for end in _possible_ends(header, completion):
        if _parses(header + completion[:end]):
            return completion[:end]
    return None


def _possible_ends(header: bytes, completion: bytes) -> list[int]:
    """Byte offsets of the lines of the completion that stand no further right than the header."""
    margin = len(header) - len(header.lstrip())
    found, offset = [], 0
    lines = completion.split(b"\n")
    for line in lines[:-1]:  # the last line may have been cut: its indentation says nothing yet
        if line.strip() and not line.lstrip().startswith(b"#") and len(line) - len(line.lstrip()) <= margin:
            found.append(offset)
        offset += len(line) + 1
    last = lines[-1]
    if last[: margin + 1].strip() and not last.lstrip().startswith(b"#"):
        found.append(offset)  # text within the margin: this line is outside whatever comes after it
    return found


def _parses(source: bytes) -> bool:
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if text[0] in " \t":  # a method: give its indentation a reason instead of moving multi-line strings
        text = "if True:\n" + text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dubious escape is not an error
        try:
            ast.parse(text)
        # A zero byte is a ValueError in some versions; absurd nesting exhausts the parser.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _find_functions(document: str, text: bytes) -> list[FunctionPrompt]:
    """Every function of a file whose header ends its line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.decode("utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split(b"\n")
    starts = np.concatenate([[0], np.cumsum([len(line) + 1 for line in lines])])
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        header_start = int(starts[node.lineno - 1])
        # The first line after which a body would be accepted ends the header (unless a body follows on it).
        candidates = range(node.lineno - 1, node.body[0].lineno - 1)
        header_line = next((i for i in candidates if _is_header(lines[node.lineno - 1 : i + 1])), None)
        if header_line is None:
            continue  # `def f(): return 1`
        cut, end = int(starts[header_line + 1]), min(int(starts[node.end_lineno]), len(text))
        found.append(
            FunctionPrompt(text[:cut], text[header_start:cut], text[cut:end], text[end:], document, node.name)
        )
    return found


def _is_header(lines: list[bytes]) -> bool:
    margin = len(lines[0]) - len(lines[0].lstrip())
    return _parses(b"\n".join([*lines, lines[0][:margin] + b"    pass\n"]))
