"""Jinja templates and expressions over the fields of a record, in the sandbox of Jinja with strict undefined names.

A task file may come from anyone, so templates cannot reach attributes of Python's internals. A name that is no field of
the records is an error that names the task, the template and the fields, before any request is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined, meta

from whorl.errors import ConfigError, DataError, one_of
from whorl.tokens.template_source import BoundedEnvironment

RESERVED = "item"  # id, gold, choices, letters and fields of the item
SHOWN_FIELDS = 20


@cache
def environment() -> BoundedEnvironment:
    """Return the environment of all templates."""
    made = BoundedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(  # as in lm-evaluation-harness
        pattern, new, text, count=count
    )
    return made


class Template:
    """One template of a task.

    Args:
        source: text of the template.
        where: task and setting, for messages: "task arc: template".
        expression: `source` is an expression, with any value; otherwise a text with {{ }}.

    Raises:
        ConfigError: a syntax error.
    """

    def __init__(self, source: str, where: str, *, expression: bool = False) -> None:
        self.source, self.where = source, where
        env = environment()
        try:
            tree = env.parse(f"{{{{ ({source}) }}}}" if expression else source)
            self.names = meta.find_undeclared_variables(tree) - set(env.globals)
            self._call: Callable[..., Any] = (
                env.compile_expression(source, undefined_to_none=False)
                if expression
                else env.from_string(source).render
            )
        except TemplateError as error:
            raise ConfigError(
                f"{where} cannot be parsed: {error}",
                expected="an expression of Jinja, such as choices.text"
                if expression
                else "a template of Jinja",
            ) from error

    def check_fields(self, fields: Iterable[str], *, required: bool = True) -> None:
        """Check that the template names fields that records have.

        Args:
            fields: of the records. required: it must name at least one.

        Raises:
            ConfigError: it names an unknown field, or none.
        """
        listed = sorted(fields)
        shown = ", ".join(listed[:SHOWN_FIELDS]) + (", ..." if len(listed) > SHOWN_FIELDS else "")
        for name in sorted(self.names - {RESERVED}):
            if name not in listed:
                raise ConfigError(
                    f"{self.where} names the field {name!r}, which no record has: {self.source!r}",
                    expected=one_of(name, listed[:SHOWN_FIELDS]), do="correct the template, or rename the field",
                )  # fmt: skip
        if required and not self.names:
            raise ConfigError(
                f"{self.where} names no field of the records, so all items are equal: {self.source!r}",
                expected=f"at least one of the fields {shown}", do="write a field as {{ name }}",
            )  # fmt: skip

    def __call__(self, fields: Mapping[str, Any], item_id: str) -> Any:
        """Return the text, or the value of an expression.

        Raises:
            DataError: the record lacks a field, or a filter fails on its value.
        """
        try:
            value = self._call(**fields)
            if isinstance(value, Undefined):
                str(value)  # raises with the name
        except Exception as error:  # templates call methods of the values of records
            raise DataError(
                f"{self.where} fails on the record {item_id!r}: {error}: {self.source!r}",
                expected="fields of the record: "
                + ", ".join(name for name in list(fields)[:SHOWN_FIELDS] if name != RESERVED),
                do="correct the template or the record",
            ) from error
        return value
