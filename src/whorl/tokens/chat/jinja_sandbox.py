"""Compiles chat templates in Jinja's sandbox, because they come from the internet.

They get the functions and tags that `transformers` gives them: `tojson` without escapes, `raise_exception`, `strftime_now`,
`{% break %}` and `{% generation %}`.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whorl.errors import DataError


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

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationExtension]
    )
    environment.filters["tojson"] = to_json  # Jinja's filter escapes for HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:
        raise DataError(
            f"the chat template cannot be compiled: {error}",
            expected="a Jinja template that transformers can run",
        ) from error
