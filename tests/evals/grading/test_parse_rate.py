"""Parse rate: the cut after a header, the end of a completion, and valid Python."""

from __future__ import annotations

import ast
import inspect
import json.decoder
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import DataError
from whorl.evals.grading.parse_rate import (
    END_OF_DOCUMENT,
    parses,
    sample_function_prompts,
    trim_to_function,
)

MODULE = b'''import os

@decorated(lambda: 1)
def plain(a, b=":"):
    """Doc."""
    if a:
        return b

    return """text
at the margin
"""

class C:
    async def method(
        self,  # def inner():
        x: int = 3,
    ) -> None:  # the end
        # a comment first
        await x
# a comment at the margin is still inside
        return None

    def one_line(self): return 1

def last():
    return {
  "less": 1,
}
'''


PROMPTS = sample_function_prompts([("m", MODULE)], 10, 0, max_per_document=10, min_body_bytes=1)


def test_prompt_ends_after_header() -> None:
    found = {prompt.name: prompt for prompt in PROMPTS}
    assert set(found) == {"plain", "method", "last"}
    assert found["plain"].header == b'def plain(a, b=":"):\n'
    assert found["plain"].body.startswith(b'    """Doc."""\n')
    assert found["plain"].body.endswith(b'margin\n"""\n')
    assert found["method"].header.startswith(b"    async def method(\n")
    assert found["method"].header.endswith(b") -> None:  # the end\n")
    for prompt in found.values():
        assert prompt.prefix + prompt.body + prompt.suffix == MODULE
        assert prompt.prefix.endswith(prompt.header)


def test_real_code_parses_and_a_cut_one_is_truncated() -> None:
    for prompt in PROMPTS:
        header, rest = prompt.header.decode(), (prompt.body + prompt.suffix).decode()
        graded = parses(header, rest)
        assert graded.outcome == "right" and graded.answer.rstrip() == prompt.body.decode().rstrip()
        assert parses(header, rest[:20], finish="length").outcome == "truncated"
        assert parses(header, "    return (\nx = 1\n").outcome == "wrong"


@pytest.mark.parametrize(
    ("completion", "body"),
    [
        (b"    return 1\nx = 2\n", b"    return 1\n"),
        (b"    return 1\nx", b"    return 1\n"),  # the cut line is outside
        (b"    return 1\n", None),  # does not end
        (b"    return 1" + END_OF_DOCUMENT, b"    return 1\n"),  # the model ended the file
        (b"    x = [\n0,\n]\n    return x\ny = 1\n", b"    x = [\n0,\n]\n    return x\n"),
        (b'    """a\nb\n    """\ny = 1\n', b'    """a\nb\n    """\n'),
        (b"    return (1\ny = 1\n", None),
        (b"    return 1 +\ny = 1\n", None),
        (b"y = 1\n", None),  # no body at all
        (b"", None),
        (b"    return '\xff'\ny = 1\n", None),  # not UTF-8
        (b"    return '\x00'\ny = 1\n", None),
        (b"    x = " + b"(" * 5_000 + b"\ny = 1\n", None),
    ],
)
def test_trim_to_function(completion: bytes, body: bytes | None) -> None:
    assert trim_to_function(b"def f():\n", completion) == body


def test_trim_ends_at_next_method() -> None:
    body = b"        return 1\n\n"
    assert trim_to_function(b"    def f(self):\n", body + b"    def g") == body


@given(st.binary(max_size=200), st.sampled_from([b"def f():\n", b"\tdef f():\n"]))
def test_trimmed_function_is_python_and_prefix(completion: bytes, header: bytes) -> None:
    body = trim_to_function(header, completion)
    if body is not None:
        assert completion.startswith(body)
        (function,) = ast.parse(textwrap.dedent((header + body).decode())).body
        assert isinstance(function, ast.FunctionDef)


def test_prompts_depend_on_documents_and_seed() -> None:
    documents = [(str(i), inspect.getsource(json.decoder).encode()) for i in range(5)]
    first, again, other = (sample_function_prompts(documents, 6, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(sum(p.document == d for p in first) <= 2 for d, _ in documents)


@pytest.mark.parametrize("text", [b"", b"x = 1\n", b"def broken(:\n", b"\xff\xfe", b"def f(): return 1\n"])
def test_prompts_reject_corpus_without_functions(text: bytes) -> None:
    with pytest.raises(DataError, match="no held-out document has a Python function"):
        sample_function_prompts([("d", text)], 3, 0)
