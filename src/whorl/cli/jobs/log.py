"""`whorl log`: topics, offsets and groups of the event log; see docs/log.md.

whorl log info

whorl log tail feedback --follow

whorl log copy sqlite:events.db postgresql://localhost/events
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.log import Log, LogRecord

LogOption = Annotated[
    str | None,
    typer.Option(
        "--log", metavar="URL", help="sqlite:FILE, postgresql://...; else $WHORL_LOG, else the store's."
    ),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="A topic; `whorl log info` lists them.")]
Since = Annotated[str, typer.Option(metavar="TIME", help="2026-11-30T10:00 in UTC, or 90s, 15m, 2h, 3d ago.")]
POLL_SECONDS = 0.2
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def info(log: LogOption = None, store: StoreOption = None) -> None:
    """Print topics with their records and settings, groups with their lag, and the guarantees of the back end.

    Examples:

        whorl log info

        whorl log info --log postgresql://localhost/events
    """
    from whorl.cli.options import format_time
    from whorl.cli.text_table import print_table
    from whorl.errors import without_credentials

    with _open(log, store) as opened:
        given = opened.guarantees
        print(
            f"{without_credentials(opened.url)}\nsurvives    {given.survives}\nduplicates  {given.duplicates}"
        )
        for what, why in given.misses:
            print(f"misses      {what}: {why}")
        if not (topics := opened.topics()):
            print("\nno topics yet: `whorl serve MODEL --log` makes them")
            return
        rows, lags = list[list[str]](), list[list[str]]()
        for name, config in topics.items():
            bounds = opened.bounds(name)
            places = [(p, at) for p, (a, b) in enumerate(bounds) if a < b for at in (a, b - 1)]
            times = [record.recorded for place in places for record in opened.fetch(name, *place, 1)]
            changed = config.model_dump(exclude_defaults=True, exclude={"partitions"})
            settings = " ".join(f"{field}={value}" for field, value in changed.items())
            counts = [config.partitions, sum(b - a for a, b in bounds), sum(b for _, b in bounds)]
            ends = [format_time(each(times)) if times else "-" for each in (min, max)]
            rows.append([name, *(f"{count:,}" for count in counts), *ends, settings or "-"])
            lags += [[group, name, f"{lag:,}"] for group, lag in sorted(opened.lags(name).items())]
        print()
        heads = ("topic", "partitions", "kept", "written", "first", "last", "settings")
        print_table(heads, rows, ("settings",))
        if lags:
            print()
            print_table(("group", "topic", "lag"), lags, ("topic",))


def tail(
    topic: TopicArgument,
    n: Annotated[int, typer.Option("-n", min=0, help="Records of each partition.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new records until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Whole records as JSONL.")] = False,
    log: LogOption = None,
    store: StoreOption = None,
) -> None:
    """Print the newest records of a topic. Text that a person wrote is encrypted and shown as `sealed`.

    Examples:

        whorl log tail feedback

        whorl log tail feedback -n 0 --follow --json
    """
    with _open(log, store) as opened:
        at = [max(first, end - n) for first, end in opened.bounds(topic)]
        while True:
            found: list[LogRecord] = []
            for p, offset in enumerate(at):
                found += (some := opened.fetch(topic, p, offset))
                at[p] = some[-1].offset + 1 if some else offset
            for record in sorted(found, key=lambda each: each.recorded):
                print(_line(record, json))
            if not (found or follow):
                return
            sys.stdout.flush()
            time.sleep(0 if found else POLL_SECONDS)


def replay(
    topic: TopicArgument, since: Since = "", to: Since = "", log: LogOption = None, store: StoreOption = None
) -> None:
    """Print the records of a topic as JSONL, partition by partition, each with its place in the log.

    Examples:

        whorl log replay feedback > feedback.jsonl

        whorl log replay feedback --since 2026-11-30T10:00 --to 1h
    """
    until = _moment(to) if to else float("inf")
    with _open(log, store) as opened:
        for record in opened.replay(topic, _moment(since) if since else 0.0):
            if record.recorded < until:
                print(_line(record, True))


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="URL of a log.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="URL of another one.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    partitions: Annotated[int | None, typer.Option(min=1, max=1024, help="Of new topics in TO.")] = None,
) -> None:
    """Copy topics into another log. Events keep their ids, so the same command continues after an interruption.

    Where the target recognises ids (`whorl log info`), a repeated copy writes nothing twice. Groups are not copied: they
    begin at the first record of the new log.

    Examples:

        whorl log copy sqlite:events.db postgresql://localhost/events

        whorl log copy sqlite:events.db sqlite:wide.db --topic feedback --partitions 16
    """
    from itertools import islice

    from whorl.log import open_log
    from whorl.log.event import UnreadableRecordError

    with _open(source, None) as old, open_log(target) as new:
        for name in topic or list(old.topics()):
            config = old.topic(name)
            if partitions or name not in new.topics():
                config = config.model_copy(update={"partitions": partitions or config.partitions})
                new.create(name, config)
            before, read, unreadable = sum(bound.next for bound in new.bounds(name)), 0, 0
            records = old.replay(name)
            while some := list(islice(records, 1000)):
                events = []
                for record in some:
                    try:
                        events.append(record.event())
                    except UnreadableRecordError as error:
                        unreadable += 1
                        print(f"left out: {error.what}", file=sys.stderr)
                new.append(name, *events)
                read += len(some)
            written = sum(bound.next for bound in new.bounds(name)) - before
            print(f"{name}: {read:,} records read, {written:,} new, {unreadable:,} unreadable")


def trim(topic: TopicArgument, log: LogOption = None, store: StoreOption = None) -> None:
    """Apply the settings of a topic: remove what retention lets go; compact it.

    Records that a group has still to read are kept, unless it is more than `max_lag` records behind.

    Examples:

        whorl log trim feedback
    """
    with _open(log, store) as opened:
        removed = opened.retain(topic)
        compacted = opened.compact(topic) if opened.topic(topic).compact else 0
        print(f"{topic}: {removed:,} offsets removed by retention, {compacted:,} records by compaction")


def _line(record: LogRecord, json: bool) -> str:
    """Return a record as JSON with its place, or shortened; its bytes if they are no event."""
    import orjson

    from whorl.errors import shorten
    from whorl.log.event import UnreadableRecordError

    place: dict[str, Any] = {
        name: getattr(record, name) for name in ("topic", "partition", "offset", "recorded")
    }
    try:
        event = record.event()
        data = {"deleted": True} if event.data is None else {k: v for k, v in event.data.items() if v}
        shown = (f"{k}={'sealed' if k == 'sealed' else shorten(str(v), 40)}" for k, v in data.items())
        text, place["event"] = f"{event.type}  {event.key}  {' '.join(shown)}", orjson.Fragment(record.value)
    except UnreadableRecordError as error:
        text, place["unreadable"] = (
            f"unreadable: {error.what}",
            record.value.decode(errors="backslashreplace"),
        )
    if json:
        return orjson.dumps(place).decode()
    when = datetime.fromtimestamp(record.recorded).isoformat(" ", "seconds")
    return f"{when}  {record.partition}/{record.offset}  {shorten(text, 160)}"


def _moment(text: str) -> float:
    """Return seconds since 1970. Raises ConfigError."""
    from whorl.errors import ConfigError

    try:
        if text[-1:] in UNITS and text[:-1].replace(".", "", 1).isdigit():
            return time.time() - float(text[:-1]) * UNITS[text[-1]]
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        expected = "2026-11-30T10:00 (UTC), or 90s, 15m, 2h, 3d ago"
        raise ConfigError(f"the time {text!r}", expected=expected) from None


def _open(url: str | None, store: str | None) -> Log:
    """Open the log. Raises ConfigError: it does not exist, which only `sqlite:` could create here."""
    from pathlib import Path

    from whorl.errors import ConfigError
    from whorl.log import default_log, open_log
    from whorl.store import Store

    url = url or default_log(Store(store).location)
    path = Path(url.removeprefix("sqlite:").removeprefix("//"))
    if url.startswith("sqlite:") and url != "sqlite:" and not path.is_file():
        raise ConfigError(
            f"there is no log {path}", do="`whorl serve MODEL --log` makes one, or give --log URL"
        )
    return open_log(url)
