"""`whorl forget`: erase an actor, and list what was trained on the actor's events."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.store import Artifact, Store


def forget(
    actor: Annotated[str, typer.Argument(help="As in the log: `user` of the requests, or the key's name.")],
    log: Annotated[
        str | None, typer.Option(metavar="URL", help="Log; else $WHORL_LOG, else the store's.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Destroy the key of an actor: what the actor wrote and was answered cannot be read from the log any more.

    The actor's feedback counts no longer. Artifacts that were made of the actor's events are listed with their descendants.

    Examples:

        whorl forget ada
    """
    from whorl.cli.text_table import print_table
    from whorl.log import Event, default_log, open_log
    from whorl.loop.actor_keys import ActorKeys
    from whorl.loop.events import FEEDBACK, create_topics
    from whorl.store import Store

    opened = Store(store).require()
    keys = ActorKeys(opened.root / "log" / "keys.db")
    had_key = keys.erase(actor)
    keys.close()
    with open_log(log or default_log(opened.root)) as events:
        create_topics(events)
        id = sha256(f"erased {actor}".encode()).hexdigest()[:32]
        events.append(FEEDBACK, Event("actor.erased", actor, {"actor": actor}, id=id))
    print(f"{actor}: {'the key is destroyed' if had_key else 'there was no key, so no text was kept'}")
    found = descendants_of_events(opened, actor)
    if not found:
        print("no artifact of this store was made of the actor's events")
        return
    names = opened.names()
    rows = [
        (", ".join(name for name in names if names[name] == one.address), one.kind, one.address[:12])
        for one in found
    ]
    print_table(("made of these events", "kind", "address"), rows, left=("kind", "address"))
    print(
        "Frozen events have the text, and models may repeat it. Run their recipe again: the step `events` leaves\n"
        "the actor out. Then move served names (`whorl promote`), and delete what no name has any more (`whorl gc`)."
    )


def descendants_of_events(store: Store, actor: str) -> list[Artifact]:
    """Return the frozen events with events of an actor, and all that was made of them, oldest first."""
    found: dict[str, Artifact] = {}
    for artifact in store.artifacts():  # oldest first: parents before children
        frozen = artifact.kind == "events" and "actors.txt" in artifact.files
        own = frozen and actor in artifact.file("actors.txt").read_text(encoding="utf-8").split("\n")
        if own or not found.keys().isdisjoint(artifact.parents.values()):
            found[artifact.address] = artifact
    return list(found.values())
