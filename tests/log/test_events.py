"""Events, their schemas, and the partition of a key."""

from __future__ import annotations

import pytest

from whorl.errors import DataError
from whorl.log import Event, LogRecord
from whorl.log.event import Schema, UnreadableRecordError
from whorl.log.partitioning import murmur2, partition_of


def record_of(value: bytes) -> LogRecord:
    return LogRecord("t", 0, 7, "k", 0.0, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # from Kafka's own tests of Utils.murmur2
        ("21", -973932308), ("foobar", -790332482), ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829), ("abc", 479470107),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    ],
)  # fmt: skip
def test_partitions_are_those_of_kafka(text, expected):
    assert murmur2(text.encode()) == expected % (1 << 32)
    assert partition_of(text, 7) == (expected & 0x7FFFFFFF) % 7


def test_an_event_comes_back_as_it_was():
    event = Event("feedback.given", "ada", {"text": "naïve 😀", "n": 3}, time=1.5, id="x", source="phone")
    assert record_of(event.encode()).event() == event


def test_data_of_old_versions_become_new_ones_step_by_step():
    schema = Schema(3, {1: lambda d: {"stars": d["like"] * 5}, 2: lambda d: {"score": d["stars"] / 5}})
    event = record_of(Event("f", "k", {"like": 1}).encode()).event({"f": schema})
    assert (event.version, event.data) == (3, {"score": 1.0})


@pytest.mark.parametrize(
    "value",
    [
        b"\xff\xfe",
        b"{",
        b"[]",
        b'{"data": {}}',
        Event("f", "k", {}, version=2).encode(),
        Event("f", "k", {}).encode()[:-20],
    ],
    ids=[
        "not UTF-8",
        "not JSON",
        "no object",
        "no attributes",
        "from the future",
        "cut",
    ],  # the same in every worker
)
def test_what_is_no_event_is_unreadable_and_names_its_place(value):
    with pytest.raises(UnreadableRecordError, match=r"t/0, offset 7"):
        record_of(value).event({"f": Schema(1)})


def test_what_is_no_json_cannot_be_written():
    with pytest.raises(DataError, match="cannot be written"):
        Event("f", "k", {"x": object()}).encode()
    with pytest.raises(DataError, match="cannot be written"):
        Event("f", "k", {"x": "\ud800"}).encode()
