"""XML dumps as a stream of elements, in bounded memory, without entities.

The parser is expat, of the standard library. A document type is refused, so no entity can be declared: neither one that
expands to gigabytes nor one that reads a file. Depth and the length of a tag are limited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO
from xml.parsers import expat

PIECE = 1 << 16
MAX_DEPTH = 64
OVERHEAD = 100  # bytes of a dictionary's entry


@dataclass(slots=True)
class Element:
    """An element with its attributes and its text.

    offset, end: bytes of the decompressed stream.
    texts: name -> text of the elements in it, and "name/attribute" -> value; of equal names the last.
    is_too_large: the texts are longer than the limit, and were not kept.
    """

    name: str
    attributes: Mapping[str, str]
    offset: int
    end: int = 0
    text: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    is_too_large: bool = False


class _Parser:
    """Collects the elements of some names."""

    def __init__(self, names: Collection[str], longest: int) -> None:
        self.names, self.longest = names, longest
        self.depth = self.element_depth = 0
        self.held = self.n_pieces = 0  # characters of the element's texts, of the text that is read
        self.found: list[Element] = []
        self.element: Element | None = None
        self.pieces: list[str] = []
        self.expat = expat.ParserCreate()
        self.expat.buffer_text = True
        self.expat.StartDoctypeDeclHandler = self._refuse
        self.expat.EntityDeclHandler = self._refuse
        self.expat.StartElementHandler = self._start
        self.expat.EndElementHandler = self._end
        self.expat.CharacterDataHandler = self._characters

    def _refuse(self, *declaration: object) -> None:
        raise ValueError(
            f"a document type or an entity is declared ({ascii(declaration[0])[:80]}), which no dump has"
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"elements are nested deeper than {MAX_DEPTH}")
        if self.element is None and name in self.names:
            self.element, self.held = Element(name, attributes, self.expat.CurrentByteIndex), 0
            self.element_depth = self.depth
        else:
            for key, value in attributes.items():
                self._keep(f"{name}/{key}", value)
        self.pieces, self.n_pieces = [], 0

    def _characters(self, text: str) -> None:
        if self.element is not None and not self.element.is_too_large:
            self.n_pieces += len(text)
            self.pieces.append(text)
            self._check_size()

    def _end(self, name: str) -> None:
        self.depth -= 1
        element, text = self.element, "".join(self.pieces)
        self.pieces, self.n_pieces = [], 0
        if element is None:
            return
        if self.depth >= self.element_depth:
            if text:
                self._keep(name, text)
            return
        element.end, element.text = self.expat.CurrentByteIndex, text
        context = self.expat.GetInputContext() or b""
        if context.startswith(b"</" + name.encode()):  # of `<row/>`, the index is that of its end
            element.end += context.find(b">") + 1
        self.found.append(element)
        self.element = None

    def _keep(self, key: str, text: str) -> None:
        element = self.element
        if element is None or element.is_too_large:
            return
        self.held += len(text) - len(element.texts[key]) if key in element.texts else len(text) + OVERHEAD
        element.texts[key] = text
        self._check_size()

    def _check_size(self) -> None:
        if self.element is not None and self.held + self.n_pieces > self.longest:
            self.element.is_too_large = True
            self.element.texts, self.pieces = {}, []


def elements(stream: BinaryIO, names: Collection[str], longest: int) -> Iterator[Element]:
    """Yield the outermost elements of these names, in order.

    Args:
        longest: characters of an element's text, and bytes of a tag.

    Raises:
        ValueError: the XML is damaged or ends early, or it declares a document type; OSError: from the stream.
    """
    parser, n_fed = _Parser(names, longest), 0
    try:
        while piece := stream.read(PIECE):
            n_fed += len(piece)
            parser.expat.Parse(piece, False)
            yield from parser.found
            parser.found.clear()
            # Expat tries a tag again when twice as much of it is there.
            if n_fed - parser.expat.CurrentByteIndex > 2 * longest + 4 * PIECE:
                raise ValueError(
                    f"a tag at byte {parser.expat.CurrentByteIndex:,} is longer than {longest:,} bytes"
                )
        parser.expat.Parse(b"", True)
    except (expat.ExpatError, LookupError) as error:  # LookupError: an unknown encoding
        yield from parser.found
        raise ValueError(f"XML: {error}") from error
    except ValueError:
        yield from parser.found
        raise
