"""The FIFO reader: one order for any number of producers and slots; views expire."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
from tests.support.slots.examples import SPEC, Draws, Numbers

from whorl.errors import ConfigError, ProducerError
from whorl.slots import FIFOReader, ProducerProcess, SerialProducer, SlotRing, SlotState


def serial(ring: SlotRing[Numbers], n: int) -> Sequence[SerialProducer]:
    return [SerialProducer(ring, Draws(), seed=7, number=i) for i in range(n)]


def read(reader: FIFOReader[Numbers], n: int) -> list[tuple[int, int, bytes]]:
    slots = (next(reader) for _ in range(n))
    return [(slot.sequence, slot.producer, slot.data.values.tobytes()) for slot in slots]


@pytest.mark.parametrize("n_producers", [1, 2, 3])
@pytest.mark.parametrize("n_slots", [3, 4, 5])
@pytest.mark.parametrize("start", [0, 4])
def test_fifo_records_in_order_from_their_producers(n_producers: int, n_slots: int, start: int) -> None:
    ring = SlotRing(SPEC, n_slots)
    with FIFOReader(ring, serial(ring, n_producers), start=start) as reader:
        got = read(reader, 17)
    assert [(s, p) for s, p, _ in got] == [(s, s % n_producers) for s in range(start, start + 17)]
    ring = SlotRing(SPEC, n_producers)  # the minimum of slots, from the beginning
    with FIFOReader(ring, serial(ring, n_producers)) as reader:
        assert read(reader, start + 17)[start:] == got


def test_fifo_processes_equal_serial_on_uneven_slots() -> None:
    ring = SlotRing(SPEC, 3)
    with FIFOReader(ring, serial(ring, 2)) as reader:
        expected = read(reader, 20)
    ring = SlotRing(SPEC, 3)
    slow, fast = (
        ProducerProcess(ring, Draws(pause), seed=7, number=i) for i, pause in enumerate((0.01, 0.0))
    )
    with FIFOReader(ring, [slow, fast]) as reader:
        assert read(reader, 20) == expected


def test_fifo_view_kept_too_long_is_poisoned() -> None:
    ring = SlotRing(SPEC, 2, poison=True)
    with FIFOReader(ring, serial(ring, 1)) as reader:
        kept = next(reader).data.values
        assert not np.isnan(kept).any()
        next(reader)
        assert np.isnan(kept).all()


def test_fifo_slot_being_read_is_not_written() -> None:
    ring = SlotRing(SPEC, 1)
    producer = SerialProducer(ring, Draws())
    with FIFOReader(ring, [producer]) as reader:
        assert next(reader).state == SlotState.READING
        producer.request(0, 1)
        with pytest.raises(ProducerError, match="slot 0 is READING"):
            producer.receive()


def test_fifo_producer_killed_between_records_raises() -> None:
    ring = SlotRing(SPEC, 1)
    producer = ProducerProcess(ring, Draws())
    with FIFOReader(ring, [producer]) as reader:
        next(reader)
        os.kill(producer.pid, signal.SIGKILL)
        with pytest.raises(ProducerError, match="SIGKILL"):
            read(reader, 2)


def test_fifo_close_ends_processes() -> None:
    ring = SlotRing(SPEC, 2)
    producers = [ProducerProcess(ring, Draws(), number=i) for i in range(2)]
    with FIFOReader(ring, producers) as reader:
        read(reader, 4)
        assert all(psutil.pid_exists(p.pid) for p in producers)
    assert not any(psutil.pid_exists(p.pid) for p in producers)


@pytest.mark.parametrize("n_producers", [0, 3])
def test_fifo_producers_without_slot_raise(n_producers: int) -> None:
    ring = SlotRing(SPEC, 2)
    with pytest.raises(ConfigError, match=f"{n_producers} producers on 2 slots"):
        FIFOReader(ring, serial(ring, n_producers))
