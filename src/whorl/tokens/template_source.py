"""Reads the chat template of a folder and compiles it in Jinja's sandbox, because templates come from the internet.

They get the functions and tags that `transformers` gives them: `tojson` without escapes, `raise_exception`, `strftime_now`,
`{% break %}` and `{% generation %}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from whorl.errors import DataError
from whorl.store.files import load_json


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
