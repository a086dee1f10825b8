"""All views of `whorl loop`."""

from __future__ import annotations

from collections.abc import Sequence

from whorl.errors import ConfigError, one_of
from whorl.loop.counter.answers import AnswersView
from whorl.loop.counter.likes import LikesView
from whorl.loop.streams.view import FoldedView

VIEWS: tuple[FoldedView, ...] = (LikesView(), AnswersView())


def views_named(names: Sequence[str]) -> list[FoldedView]:
    """Return views by name. Raises ConfigError."""
    known = {view.name: view for view in VIEWS}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no view {name!r}", expected=one_of(name, list(known)))
    return [known[name] for name in names]
