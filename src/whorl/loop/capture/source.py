"""The interface of a source of changes, and the table of sources by what the user names.

A source keeps what was committed until it is durable in the log: `read`, append, `acknowledge`. A position that was not
acknowledged is read again, with equal ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from whorl.errors import ConfigError, WhorlError, one_of, without_credentials
from whorl.log.event import Event
from whorl.loop.capture.change import Transaction
from whorl.registry import import_backend

# scheme -> class, and the extra that it needs
SOURCES = {
    "folder": ("whorl.loop.capture.folder:FolderSource", ""),
    "sqlite": ("whorl.loop.capture.sqlite:SqliteSource", ""),
    "postgresql": ("whorl.loop.capture.postgres:PostgresSource", "postgres"),
    "mariadb": ("whorl.loop.capture.mariadb:MariadbSource", "mariadb"),
}


class SourceUnavailableError(WhorlError):
    """The source does not answer now. It is tried again."""


class SourceLostError(WhorlError):
    """The source does not have the changes after a position: a dropped slot, a log that was removed. A snapshot follows."""


@dataclass(frozen=True)
class SourceOptions:
    """The arguments of a source.

    Attributes:
        target: a path or URL. table: of a database. name: of the topic, for slots and folders.
        state: folder in which the source may keep files. history: yields all events of the topic so far.
    """

    target: str
    table: str
    name: str
    state: Path
    history: Callable[[], Iterator[Event]] = lambda: iter(())

    @property
    def place(self) -> str:
        """The target without credentials; an absolute path."""
        if "://" in self.target:
            return without_credentials(self.target)
        return str(Path(self.target).expanduser().resolve())


class ChangeSource(ABC):
    """See the top of this file. For one thread. The constructor opens it and takes `SourceOptions`.

    Raises (all methods): SourceUnavailableError; ConfigError: what is named cannot be captured.
    """

    connector: ClassVar[str]

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    @abstractmethod
    def read(self, position: Mapping[str, Any] | None) -> Iterator[Transaction]:
        """Yield some of what was committed after a position, oldest first; nothing at the newest. None: a snapshot first.

        Raises:
            SourceLostError: the position is gone, or of another source.
        """

    def acknowledge(self, position: Mapping[str, Any] | None) -> None:  # noqa: B027
        """Release what is kept up to a position: it is durable in the log."""

    def rejected(self) -> Sequence[tuple[str, str]]:
        """Return (key, reason) of what could not be read since the last call."""
        return ()

    def retained(self) -> int:
        """Return the bytes that the source keeps until they are acknowledged."""
        return 0

    def release(self) -> None:  # noqa: B027
        """Give up what is retained, before it fills the disk. The next `read` rebuilds."""

    def close(self) -> None:  # noqa: B027
        """Close what is open."""

    def __enter__(self) -> ChangeSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def scheme_of(target: str) -> str:
    """Return the key of `SOURCES`. Raises ConfigError: neither a folder, a SQLite file nor a known URL."""
    scheme, is_url, _ = target.partition("://")
    if is_url:
        scheme = {"postgres": "postgresql", "mysql": "mariadb"}.get(scheme, scheme)
        if scheme not in SOURCES:
            raise ConfigError(
                f"the source {target!r} begins with {scheme!r}", expected=one_of(scheme, list(SOURCES))
            )
        return scheme
    path = Path(target).expanduser()
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise ConfigError(
            f"there is no {target}", expected="a folder, a SQLite file, postgresql://... or mariadb://..."
        )
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            raise ConfigError(f"{target} is no SQLite database", expected="a folder or a SQLite file")
    return "sqlite"


def open_source(options: SourceOptions) -> ChangeSource:
    """Open a source.

    Raises:
        ConfigError: no such source, no table is named, or its client is not installed. SourceUnavailableError.
    """
    scheme = scheme_of(options.target)
    if (scheme == "folder") == bool(options.table):
        problem = "has no tables" if options.table else "needs the name of a table"
        do = "leave out --table" if options.table else "give --table NAME"
        raise ConfigError(f"the source {options.target} {problem}", do=do)
    opened: ChangeSource = import_backend(scheme, *SOURCES[scheme])(options)
    return opened
