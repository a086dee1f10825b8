"""Escape text that spells special tokens, so that encoding finds none of them.

A chat template (`chat.py`) is foreign code: it may trim, split and search its strings, so they must stay strings, without
wrappers or placeholders. One more character, which occurs nowhere in the conversation (`unused_character`), survives all of
this. `SpecialTokenEscaper` puts it inside of each spelling of a special token, and the rendered text is encoded in the
pieces between:

    "a <|im_end|> b"   ->   "a <*|im_end|> b"   ->   rendered   ->   encode("... a <") + encode("|im_end|> b ...")

A special token of one character cannot be broken, and text that has one is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from whorl.errors import DataError

# Names and keywords of the chat API, which templates compare with; none of them is part of markup.
API_WORDS = frozenset((
    "role", "content", "name", "tool_calls", "tool_call_id", "type", "function", "id", "arguments", "parameters",
    "description", "properties", "required", "object", "string", "number", "integer", "boolean", "array", "null", "text",
))  # fmt: skip


class SpecialTokenEscaper:
    """Puts `mark` into strings so that they spell no special token, alone or together with the template's text.

    A spelling is broken after its first character. A string that ends like the start of a token ("a <") gets a mark at its
    end: it could change the template's next token ("<<|im_end|>", where "<<" is a token too). A string that is not message
    content but a name gets a mark before it if it starts like the end of a token or lies inside of one, since it could
    complete the template's text. White space at the ends stays outside of these marks, because templates trim it.

    Raises:
        DataError: on a call, if the text has a special token of one character.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self.special_tokens = sorted(special_tokens, key=len, reverse=True)
        alternatives = "|".join(re.escape(t) for t in self.special_tokens if len(t) > 1)
        self._spelled_pattern = re.compile(f"(?={alternatives or '(?!)'})(.)", re.DOTALL)
        self._one_character_tokens = {t for t in self.special_tokens if len(t) == 1}
        self._proper_prefixes = {t[:n] for t in self.special_tokens for n in range(1, len(t))}
        self._proper_suffixes = {t[n:] for t in self.special_tokens for n in range(1, len(t))}
        self._max_token_length = max(map(len, self.special_tokens), default=0)

    def __call__(self, value: Any, mark: str, is_content: bool = False) -> Any:
        """Escape all strings in `value`, at any depth. is_content: the strings are contents of messages."""
        if isinstance(value, str):
            return self._escape_text(value, mark, is_content)
        if isinstance(value, Mapping):
            return {
                self(k, mark) if isinstance(k, str) else k: self(v, mark, k == "content")
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self(v, mark, is_content) for v in value]
        return value

    def _escape_text(self, text: str, mark: str, is_content: bool) -> str:
        if not self._one_character_tokens.isdisjoint(text):
            raise DataError(
                f"the conversation has the special token {min(self._one_character_tokens.intersection(text))!r}",
                expected="text that this tokenizer can spell without special tokens",
            )
        inner = text.strip()
        if not inner or text in API_WORDS:
            return text
        start = text.index(inner)
        before, after = text[:start], text[start + len(inner) :]
        escaped = self._spelled_pattern.sub(lambda m: m[1] + mark, inner)
        if any(
            inner[-n:] in self._proper_prefixes for n in range(1, min(len(inner), self._max_token_length) + 1)
        ):
            escaped += mark
        if not is_content and (
            any(
                inner[:n] in self._proper_suffixes
                for n in range(1, min(len(inner), self._max_token_length) + 1)
            )
            or any(inner in t for t in self.special_tokens)
        ):
            escaped = mark + escaped
        return before + escaped + after


def unused_character(value: Any) -> str:
    """Return a character that does not occur in `value`: a Unicode noncharacter or a private-use character.

    Raises:
        DataError: all of them occur.
    """
    seen: set[str] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            seen.update(item)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
    for number in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)):
        if chr(number) not in seen:
            return chr(number)
    raise DataError("the conversation uses every private character there is", expected="text")
