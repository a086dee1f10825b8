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
from whorl.evals.parse_rate import (
    END_OF_DOCUMENT,
    FunctionPrompt,
    parse_rate,
    reference_parse_rate,
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


def test_reference_code_parses() -> None:
    rate = reference_parse_rate(PROMPTS)
    assert (rate.parsed, rate.unfinished, rate.rate) == (3, 0, 1.0)
    for prompt, body in rate.examples:
        assert body is not None and body.rstrip() == prompt.body.rstrip()


@pytest.mark.parametrize("limit", [5, 20])
def test_limit_inside_body_is_unfinished(limit: int) -> None:
    rate = reference_parse_rate(PROMPTS, limit=limit)
    assert (rate.parsed, rate.unfinished) == (0, 3)


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


def test_parse_rate_counts_each_result() -> None:
    completions = [b"    return 1\nx\n", b"    return (\nx\n", b"    unfinished"]
    completions += [b"        return 1\n    y\n"]
    headers = [b"def f():\n"] * 3 + [b"    def f():\n"]
    prompts = [FunctionPrompt(b"", header, b"", b"", "d", "f") for header in headers]
    rate = parse_rate(prompts, lambda _: completions)
    assert (rate.n, rate.parsed, rate.unfinished, rate.median_bytes) == (4, 2, 1, 15.0)
    with pytest.raises(ValueError, match="4 prompts, but 1 completions"):
        parse_rate(prompts, lambda _: [b""])


def test_prompts_depend_on_documents_and_seed() -> None:
    documents = [(str(i), inspect.getsource(json.decoder).encode()) for i in range(5)]
    first, again, other = (sample_function_prompts(documents, 6, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(sum(p.document == d for p in first) <= 2 for d, _ in documents)


@pytest.mark.parametrize("text", [b"", b"x = 1\n", b"def broken(:\n", b"\xff\xfe", b"def f(): return 1\n"])
def test_prompts_reject_corpus_without_functions(text: bytes) -> None:
    with pytest.raises(DataError, match="no held-out document has a Python function"):
        sample_function_prompts([("d", text)], 3, 0)
