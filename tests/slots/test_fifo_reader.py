"""The FIFO reader: one order for any number of producers and slots; views expire; failures of producers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.support.slots import examples
from tests.support.slots.examples import Draws, expected_records, open_reader, read
from tests.support.slots.processes import has_exited, wait_until

from whorl.errors import ConfigError, ProducerError
from whorl.slots import ProducerProcess, SerialProducer, SlotState

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("n_producers", [1, 2, 3])
@pytest.mark.parametrize("slots", [3, 4, 5])
@pytest.mark.parametrize("start", [0, 4])
def test_fifo_records_in_order_from_their_producers(n_producers: int, slots: int, start: int) -> None:
    producers = [Draws()] * n_producers
    with open_reader(*producers, slots=slots, kind=SerialProducer, reader={"start": start}) as reader:
        got = read(reader, 17)
    assert [(s, p) for s, p, *_ in got] == [(s, s % n_producers) for s in range(start, start + 17)]
    # On the minimum of slots, from the beginning
    assert expected_records(start + 17, n_producers)[start:] == got


def test_fifo_processes_equal_serial_on_uneven_slots() -> None:
    with open_reader(Draws(0.01), Draws(), slots=3) as reader:
        got = read(reader, 20)
    assert got == expected_records(20, 2)
    assert len({values for *_, values in got}) == 20


def test_fifo_view_kept_too_long_is_poisoned() -> None:
    with open_reader(Draws(), slots=2, kind=SerialProducer) as reader:
        kept = next(reader).data.values
        assert not np.isnan(kept).any()
        next(reader)
        assert np.isnan(kept).all()


def test_fifo_slot_being_read_is_not_written() -> None:
    with open_reader(Draws(), kind=SerialProducer) as reader:
        assert next(reader).state == SlotState.READING
        reader.producers[0].request(0, 1)
        with pytest.raises(ProducerError, match="slot 0 is READING"):
            reader.producers[0].receive()


def test_fifo_close_ends_processes() -> None:
    with open_reader(Draws(), Draws(), slots=2) as reader:
        read(reader, 4)
        pids = [p.pid for p in reader.producers]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("n_producers", [0, 3])
def test_fifo_producers_without_slot_raise(n_producers: int) -> None:
    with pytest.raises(ConfigError, match=f"{n_producers} producers on 2 slots"):
        open_reader(*[Draws()] * n_producers, slots=2, kind=SerialProducer)


WRONG = [
    (examples.WrongShape(), r"(?s)'values' of record 0.*could not broadcast.*float64 of shape \(5,\)"),
    (examples.WrongType(), r"(?s)'label' of record 0: float64 values cannot be stored as int64.*shape \(\)"),
]


def test_producer_exception_raises_with_traceback() -> None:
    words = r"(?s)Fails.*Traceback.*record two cannot be made"
    with pytest.raises(ProducerError, match=words), open_reader(examples.Fails(), slots=2) as reader:
        read(reader, 5)


def test_hung_producer_is_ended() -> None:
    hangs = open_reader(Draws(pause=60), timeout=1.0)
    with pytest.raises(ProducerError, match="wrote no record for 1 s"), hangs as reader:
        read(reader, 1)


@pytest.mark.parametrize(("producer", "words"), WRONG)
@pytest.mark.parametrize("kind", [SerialProducer, ProducerProcess])
def test_producer_wrong_shape_or_dtype_raises(producer: Draws, words: str, kind: Any) -> None:
    with pytest.raises(ProducerError, match=words), open_reader(producer, slots=2, kind=kind) as reader:
        read(reader, 1)


@pytest.mark.parametrize(("pause", "n_read", "state"), [(0, 1, SlotState.FREE), (30, 0, SlotState.WRITING)])
def test_killed_producer_raises_and_slot_keeps_state(pause: float, n_read: int, state: SlotState) -> None:
    """Killed between records, and during a fill."""
    reader = open_reader(Draws(pause))
    slot = reader.ring.slots[0]
    with pytest.raises(ProducerError, match=r"signal 9|SIGKILL"), reader:
        read(reader, n_read)
        wait_until(lambda: slot.state != SlotState.FREE)
        os.kill(reader.producers[0].pid, signal.SIGKILL)
        read(reader, 1)
    assert slot.state == state


PARENT = """
import time
from tests.support.slots.examples import Draws, open_reader
reader = open_reader(Draws(), slots=2)
next(reader)
print(reader.producers[0].pid, flush=True)
time.sleep(60)
"""


def test_producer_exits_with_killed_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
        parent.kill()
    wait_until(lambda: has_exited(child))
