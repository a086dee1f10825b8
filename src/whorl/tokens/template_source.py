"""Reads the chat template of a folder and compiles it in Jinja's sandbox, because templates come from the internet.

The sandbox of Jinja protects Python's internals and bounds `range`. `BoundedEnvironment` also bounds the memory that one
number of a template decides, before it is allocated, and each text that a template makes; templates of tasks use it too.

Chat templates get the functions and tags that `transformers` gives them: `tojson` without escapes, `raise_exception`,
`strftime_now`, `{% break %}` and `{% generation %}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, wraps
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whorl.errors import DataError
from whorl.store.files import load_json

MAX_TEXT = 1 << 24  # characters of a text, items of a list, or an integer that decides them
MAX_BITS = 1 << 16  # of an integer
# Fields of formats with a width of eight digits, or of an argument.
_WIDE = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*(?:[0-9]{8}|\*)|\{[^{}]*:[^{}]*[0-9]{8}|\{\w*:[^{}\s]*\{")
_GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice")


def _check(size: int, limit: int = MAX_TEXT) -> None:
    if size > limit:
        raise ValueError(f"a value of the template would have more than {limit:,} characters, items or bits")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 1


def _check_call(name: str, given: Sequence[Any]) -> None:
    """Check the size of what a method or filter of texts may return. Raises ValueError."""
    if name in ("format", "format_map", "%"):
        _check(MAX_TEXT + 1 if _WIDE.search(str(given[0])) else 0)
    elif name == "replace":
        text, old, new = map(str, given[:3])
        _check(len(text) + text.count(old) * len(new))
    elif name == "join":
        _check(prod(map(_size, given)))
        _check(sum(_size(part) for value in given if isinstance(value, list) for part in value))
    else:
        _check(max((int(value) for value in given[1:] if isinstance(value, int)), default=0))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        _check_call(name, [v for v in (*values, *named.values()) if not isinstance(v, EvalContext)])
        return function(*values, **named)

    return call


def _concat(pieces: Iterable[str]) -> str:
    size, kept = 0, []
    for piece in pieces:
        _check(size := size + len(piece))
        kept.append(piece)
    return "".join(kept)


class _BoundedGenerator(CodeGenerator):
    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the top of this file. Templates raise ValueError for what exceeds a bound."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _BoundedGenerator
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters |= {name: _bounded(name, self.filters[name]) for name in _GROWING_FILTERS}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [abs(value) for value in (left, right) if isinstance(value, int)]
        if len(numbers) == 2:
            bits = numbers[0].bit_length()
            _check({"*": bits + numbers[1].bit_length(), "**": bits * numbers[1]}.get(operator, 0), MAX_BITS)
        elif operator == "*":
            _check(_size(left) * _size(right) * max(numbers, default=1))
        elif operator == "+":
            _check(_size(left) + _size(right))
        elif isinstance(left, str):
            _check_call("%", [left])
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *values: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_call(method.__name__, (text, *values, *named.values()))
        return super().call(context, function, *values, **named)


class _GenerationExtension(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's text in some templates; keeps the content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Return the compiled program. Raises DataError: it is no template."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationExtension]
    )
    environment.filters["tojson"] = _bounded("tojson", to_json)  # Jinja's filter escapes for HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:
        raise DataError(
            f"the chat template cannot be compiled: {error}",
            expected="a Jinja template that transformers can run",
        ) from error


def read_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return (the template of a model's folder or None, names and texts of special tokens).

    Raises:
        DataError: a file is damaged.
    """
    path, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = load_json(path) if path.is_file() else {}
        source = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
    except (OSError, ValueError) as error:
        raise DataError(
            f"the chat template of {folder} cannot be read: {error}",
            expected=f"{path.name} with a JSON object, {template_file.name} in UTF-8",
        ) from error
    config = config if isinstance(config, dict) else {}
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        entry = config.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            tokens[name] = text
    source = config.get("chat_template") if source is None else source
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if source is not None and not isinstance(source, str):
        raise DataError(f"{path}: field 'chat_template' is {source!r}", expected="a Jinja template")
    return source, tokens


def turn_end(template: Template, tokens: Mapping[str, str], known: Mapping[str, int]) -> int | None:
    """Return the id of the token that a template writes behind a reply, if there is one.

    tokens: names and texts that the template may use. known: ids of special and added tokens by text.
    """
    reply = "\ufdd0"
    turns = [{"role": role, "content": reply} for role in ("system", "user", "assistant")]
    for messages in (turns[1:], turns):
        try:
            text = template.render(**tokens, messages=messages, tools=None, add_generation_prompt=False)
        except Exception:  # of foreign code; it may need other roles
            continue
        _, found, behind = text.rpartition(reply)
        names = [name for name in known if found and name and behind.lstrip().startswith(name)]
        return known[max(names, key=len)] if names else None
    return None
