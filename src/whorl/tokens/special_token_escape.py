"""Text in which special tokens are spelled, made such that encoding finds none of them.

A chat template (`chat.py`) is a program of others: it may trim, split and search the strings that it is given, so they must
stay strings. They cannot be wrapped in anything, nor replaced by marks that are filled in later. What does go through
unharmed is one more character, of a kind that occurs nowhere in the conversation (`unused`): it is put inside of each
spelling of a special token (`Breaker`), and what the template has made of it all is encoded in the pieces between.

    "a <|im_end|> b"   ->   "a <*|im_end|> b"   ->   rendered   ->   encode("... a <") + encode("|im_end|> b ...")

A special token that is one character long cannot be broken, and text that holds one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from whorl.errors import DataError

# Names and words of the interface itself, which templates compare with; none of them is a piece of markup.
API_WORDS = frozenset((
    "role", "content", "name", "tool_calls", "tool_call_id", "type", "function", "id", "arguments", "parameters",
    "description", "properties", "required", "object", "string", "number", "integer", "boolean", "array", "null", "text",
))  # fmt: skip


class SpecialTokenEscaper:
    """Puts `mark` into strings so that no token of `texts` is spelled, neither by them nor together with what stands around.

    A spelling is broken after its first character. A string that ends like the beginning of a token ("a <") could make the
    template's next one another ("<<|im_end|>", where "<<" is a token too), so it gets a mark behind; one that is not what is
    said, but a name, and begins like the end of a token or lies inside of one, could complete what the template writes
    around it, and gets a mark before. White space at the ends stays outside of these marks: templates trim it.

    Raises:
        DataError: on a call: a token of one character is in the text.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self.special_tokens = sorted(special_tokens, key=len, reverse=True)
        found = "|".join(re.escape(t) for t in self.special_tokens if len(t) > 1)
        self._spelled_pattern = re.compile(f"(?={found or '(?!)'})(.)", re.DOTALL)
        self._one_character_tokens = {t for t in self.special_tokens if len(t) == 1}
        self._proper_prefixes = {t[:n] for t in self.special_tokens for n in range(1, len(t))}
        self._proper_suffixes = {t[n:] for t in self.special_tokens for n in range(1, len(t))}
        self._max_token_length = max(map(len, self.special_tokens), default=0)

    def __call__(self, value: Any, mark: str, is_content: bool = False) -> Any:
        """All strings in `value`, at any depth. said: these are contents of messages."""
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
                f"the conversation holds {min(self._one_character_tokens.intersection(text))!r}, a special token of this model",
                expected="text that this tokenizer can spell without special tokens",
            )
        inner = text.strip()
        if not inner or text in API_WORDS:
            return text
        at = text.index(inner)
        before, after = text[:at], text[at + len(inner) :]
        broken = self._spelled_pattern.sub(lambda m: m[1] + mark, inner)
        if any(
            inner[-n:] in self._proper_prefixes for n in range(1, min(len(inner), self._max_token_length) + 1)
        ):
            broken += mark
        if not is_content and (
            any(
                inner[:n] in self._proper_suffixes
                for n in range(1, min(len(inner), self._max_token_length) + 1)
            )
            or any(inner in t for t in self.special_tokens)
        ):
            broken = mark + broken
        return before + broken + after


def unused_character(value: Any) -> str:
    """A character that occurs nowhere in `value`; one of those that Unicode keeps for nobody, or for private use.

    Raises:
        DataError: all of them occur.
    """
    seen: set[str] = set()
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            seen.update(one)
        elif isinstance(one, Mapping):
            rest += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            rest += one
    for number in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)):
        if chr(number) not in seen:
            return chr(number)
    raise DataError("the conversation uses every private character there is", expected="text")
