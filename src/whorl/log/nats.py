"""A log in NATS JetStream: `nats://HOST:PORT`.

Each partition is one stream, so a record's sequence number - 1 is its offset. The id of an event is its `Nats-Msg-Id`.
Records are read by batched direct gets (ADR-31), which need no consumer. Documents are in the key-value bucket `whorl`.
The client is asynchronous and has its own thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import nats
from nats.js.api import StreamConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError

from whorl.log import port
from whorl.log.event import Event, LogRecord
from whorl.log.partitioning import partition_of
from whorl.log.port import OffsetRange, OffsetRemovedError, Position, TopicConfig

WINDOW = 120.0  # seconds in which the server recognises an id
SECONDS = 10.0  # wait for an answer
FETCH_BYTES = 16 << 20
_T = TypeVar("_T")


class NatsLog(port.Log):
    """See the top of this file. Raises LogUnavailableError: the server does not answer, or has no JetStream."""

    guarantees = port.Guarantees(
        survives="kill -9 of the server; power failure if its sync_interval is `always`, or with replicas",
        duplicates=f"an id within {WINDOW:.0f} s of its first append",
    )

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client, self._sending = nats.NATS(), set[Future[list[Position]]]()
        self._running = set[asyncio.Task[Any]]()  # they end when the connection does
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whorl-nats", daemon=True)
        self._thread.start()
        try:
            self._call(self._connect())
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        async def disconnected() -> None:
            for task in self._running:
                task.cancel()

        connect = self._client.connect(
            self.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, pending_size=64 << 20,
            error_cb=_ignore, disconnected_cb=disconnected,
        )  # fmt: skip
        await asyncio.wait_for(connect, SECONDS / 2)
        self._stream = self._client.jetstream(timeout=SECONDS)
        self._documents = await self._stream.create_key_value(bucket="whorl", history=1)

    def _make(self, topic: str, config: TopicConfig) -> None:
        for p in range(config.partitions):
            stream = StreamConfig(
                name=_stream(topic, p), subjects=[_subject(topic, p)], storage="file", allow_direct=True,
                duplicate_window=WINDOW,
            )  # fmt: skip
            self._call(self._stream.add_stream(stream))

    def submit(self, topic: str, events: Sequence[Event]) -> Future[list[Position]]:
        self._check_open()
        config = self.topic(topic)
        values = port.checked(config, topic, events, self._client.max_payload - 4096)

        async def publish(event: Event, value: bytes) -> Position:
            p = partition_of(event.key, config.partitions)
            headers = {"Nats-Msg-Id": quote(event.id), "Key": quote(event.key)}
            sent = await self._stream.publish(
                _subject(topic, p), value, stream=_stream(topic, p), headers=headers
            )
            return Position(p, sent.seq - 1)

        async def publish_all() -> list[Position]:  # in order: each sends before it waits
            return list(await asyncio.gather(*map(publish, events, values)))

        future = asyncio.run_coroutine_threadsafe(self._guard(publish_all()), self._loop)
        self._sending.add(future)
        future.add_done_callback(self._sending.discard)
        return future

    def bounds(self, topic: str) -> list[OffsetRange]:
        compacts, found = self.topic(topic).compact, list[OffsetRange]()
        for p in range(self.topic(topic).partitions):
            state = self._call(self._stream.stream_info(_stream(topic, p))).state
            # Compaction removes first messages too, which is no retention.
            first = self._trimmed(topic, p) if compacts else max(0, state.first_seq - 1)
            found.append(OffsetRange(first, state.last_seq))
        return found

    def fetch(self, topic: str, partition: int, offset: int, limit: int = 1000) -> list[LogRecord]:
        found = self._call(self._get(topic, partition, offset, limit))
        if not found or found[0].offset > offset:
            first = self.bounds(topic)[partition].first
            if offset < first:
                raise OffsetRemovedError(topic, partition, offset, first - 1)
        return found

    async def _get(self, topic: str, partition: int, offset: int, limit: int) -> list[LogRecord]:
        inbox, found = self._client.new_inbox(), list[LogRecord]()
        answers = await self._client.subscribe(inbox, pending_bytes_limit=2 * FETCH_BYTES)
        try:
            query: dict[str, Any] = {"seq": offset + 1, "batch": limit, "max_bytes": FETCH_BYTES}
            query["next_by_subj"] = _subject(topic, partition)
            target = f"$JS.API.DIRECT.GET.{_stream(topic, partition)}"
            await self._client.publish(target, json.dumps(query).encode(), reply=inbox)
            while "Status" not in (headers := (message := await answers.next_msg(SECONDS)).headers):
                when = datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
                key, at = unquote(headers.get("Key", "")), int(headers["Nats-Sequence"]) - 1
                found.append(LogRecord(topic, partition, at, key, when, message.data))
            if headers["Status"] not in ("204", "404"):  # end of the batch, no such message
                raise nats.errors.Error(str(headers))
            return found
        finally:
            await answers.unsubscribe()

    def trim(self, topic: str, partition: int, offset: int) -> None:
        bound, name = min(offset, self.bounds(topic)[partition].next), f"first/{topic}/{partition}"
        while bound > self._trimmed(topic, partition):
            self.put_document(name, str(bound).encode(), self.document(name)[1])
        self._call(self._stream.purge_stream(_stream(topic, partition), seq=bound + 1))

    def _trimmed(self, topic: str, partition: int) -> int:
        return int(self.document(f"first/{topic}/{partition}")[0] or 0)

    def compact(self, topic: str, now: float | None = None) -> int:
        oldest, newest = (now or time.time()) - self.topic(topic).tombstone_seconds, dict[Any, LogRecord]()
        old = list[LogRecord]()
        for record in self.replay(topic):
            if before := newest.get(place := (record.partition, record.key)):
                old.append(before)
            newest[place] = record
        old += [r for r in newest.values() if r.recorded < oldest and r.is_tombstone]
        for record in old:
            self._call(self._stream.delete_msg(_stream(topic, record.partition), record.offset + 1))
        return len(old)

    def document(self, name: str) -> tuple[bytes, int]:
        async def get() -> tuple[bytes, int]:
            try:
                entry = await self._documents.get(_name(name))
                return entry.value or b"", entry.revision
            except KeyNotFoundError:
                return b"", 0

        return self._call(get())

    def put_document(self, name: str, content: bytes, version: int) -> bool:
        async def put() -> bool:
            try:
                await self._documents.update(_name(name), content, last=version)
                return True
            except KeyWrongLastSequenceError:
                return False

        return self._call(put())

    def document_names(self, prefix: str) -> list[str]:
        async def names() -> list[str]:
            try:
                return [unquote(key.replace("=", "%")) for key in await self._documents.keys()]
            except NoKeysError:
                return []

        return [name for name in self._call(names()) if name.startswith(prefix)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            wait(list(self._sending), timeout=SECONDS)
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            self._check_open()
        except port.LogUnavailableError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._guard(work), self._loop).result()

    async def _guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Turn errors of the client into LogUnavailableError."""
        task = asyncio.ensure_future(work)
        try:
            if self._client.is_reconnecting:
                task.cancel()
            self._running.add(task)
            return await task
        except (nats.errors.Error, TimeoutError, OSError, asyncio.CancelledError) as error:
            problem, expected = (
                str(error) or "no connection",
                "a NATS server with JetStream (nats-server -js)",
            )
            raise port.unavailable(self.url, problem, expected) from error
        finally:
            self._running.discard(task)


async def _ignore(error: Exception) -> None:
    """The client logs each failed attempt to connect; callers get an error."""


def _stream(topic: str, partition: int) -> str:
    return f"whorl-{topic.replace('.', '=')}-{partition}"


def _subject(topic: str, partition: int) -> str:
    return f"whorl.{topic}.{partition}"


def _name(document: str) -> str:
    """Return the key of a document: letters, digits and `-_/=`."""
    return quote(document, safe="/").replace(".", "%2E").replace("~", "%7E").replace("%", "=")
