"""The settings of a search index: `STORE/search/NAME/settings.json`, replaced in one step.

    STORE/search/NAME/settings.json    GENERATION/rows.db    GENERATION/index/

A rebuild fills a new generation while the old one is searched and kept up to date. The switch is a write of this file.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whorl.errors import ConfigError, DataError, one_of, shorten
from whorl.files import write_atomic


class SearchSettings(BaseModel):
    """The source of an index and its columns.

    Attributes:
        topic: of the records. joins: topics whose records, by the same key, give further fields.
        text, title: columns of the record. fields: columns; None is all others.
        log, index: URLs; "" are the log of the store, and an index in its folder.
        encoder: address of the embedder whose vectors are searched; "" is none. filling: its successor, until all have both.
        passage: characters of one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: str
    joins: tuple[str, ...] = ()
    text: str = "text"
    title: str = "title"
    fields: tuple[str, ...] | None = None
    log: str = ""
    index: str = ""
    encoder: str = ""
    filling: str = ""
    passage: int = Field(default=1000, ge=100)
    generation: int = 0

    @property
    def encoders(self) -> list[str]:
        """The embedders whose vectors are written."""
        return [name for name in (self.encoder, self.filling) if name]


def load_settings(store: Path, name: str) -> SearchSettings:
    """Return the settings. Raises ConfigError: no such index. DataError: the file is damaged."""
    path = store / "search" / name / "settings.json"
    try:
        return SearchSettings.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        names = sorted(p.parent.name for p in path.parent.parent.glob("*/settings.json"))
        raise ConfigError(
            f"there is no search index {shorten(name)!r}", expected=one_of(name, names),
            do=f"make it: whorl watch FOLDER --to {shorten(name)}",
        ) from None  # fmt: skip
    except ValidationError as error:
        raise DataError(f"{path}: {error}", expected="the settings of a search index") from error


def fill_vectors(store: Path, name: str, encoder: str) -> None:
    """Have the vectors of another embedder written, and then searched in place of the old ones."""
    settings = load_settings(store, name)
    if encoder != settings.encoder:
        save_settings(store, name, settings.model_copy(update={"filling": encoder}))


def save_settings(store: Path, name: str, settings: SearchSettings) -> None:
    """Replace the settings in one step."""
    path = store / "search" / name / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, settings.model_dump_json(indent=2) + "\n")


def index_url(store: Path, name: str, settings: SearchSettings) -> str:
    """Return the URL of the current generation of an index."""
    if settings.index:
        return f"{settings.index}#{name}-{settings.generation}"
    return str(store / "search" / name / str(settings.generation) / "index")
