"""Slots: state transitions, equal bits from processes and serial producers, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.slots.examples import SPEC, Draws, Fails, Numbers, WrongShape, WrongType

from whorl.errors import ProducerError
from whorl.slots import FIFOReader, ProducerProcess, SerialProducer, SlotRing, SlotState
from whorl.slots.spec import FieldArray

ROOT = Path(__file__).parents[2]


def read(reader: FIFOReader[Numbers], n: int) -> list[tuple[int, bytes]]:
    return [
        (int(slot.data.label), slot.data.values.tobytes()) for slot, _ in zip(reader, range(n), strict=False)
    ]


def test_producer_process_equals_serial() -> None:
    ring = SlotRing(SPEC, 3)
    with FIFOReader(ring, [SerialProducer(ring, Draws(), seed=7)]) as reader:
        serial = read(reader, 20)
    ring = SlotRing(SPEC, 3)
    with FIFOReader(ring, [ProducerProcess(ring, Draws(), seed=7)]) as reader:
        assert read(reader, 20) == serial
    assert [label for label, _ in serial] == list(range(20)) and len({v for _, v in serial}) == 20
    ring = SlotRing(SPEC, 2)  # resumed at another number, in another ring
    with FIFOReader(ring, [SerialProducer(ring, Draws(), seed=7)], start=11) as reader:
        assert read(reader, 5) == serial[11:16]


def test_producer_exception_raises_with_traceback() -> None:
    ring = SlotRing(SPEC, 2)
    with (
        pytest.raises(ProducerError, match="record two cannot be made") as caught,
        FIFOReader(ring, [ProducerProcess(ring, Fails())]) as reader,
    ):
        read(reader, 5)
    assert "Traceback" in str(caught.value) and "Fails" in str(caught.value)


@pytest.mark.parametrize(
    ("producer", "words"),
    [
        (WrongShape(), r"(?s)'values' of record 0.*could not broadcast.*expected: float64 of shape \(5,\)"),
        (WrongType(), r"(?s)'label' of record 0: float64 values cannot be stored as int64.*shape \(\)"),
    ],
)
@pytest.mark.parametrize("kind", [SerialProducer, ProducerProcess])
def test_producer_wrong_shape_or_dtype_raises(producer: Draws, words: str, kind: Any) -> None:
    ring = SlotRing(SPEC, 2)
    with pytest.raises(ProducerError, match=words), FIFOReader(ring, [kind(ring, producer)]) as d:
        read(d, 1)


@pytest.mark.parametrize("value", [np.ones(3), 1.5, [0.5, 1.0, 2.0], torch.ones(3)])
def test_field_array_rejects_lossy_assignment(value: Any) -> None:
    numbers = np.zeros(6, np.int64).view(FieldArray)
    with pytest.raises(TypeError, match="cannot be stored as int64"):
        numbers[2:5] = value
    with pytest.raises(TypeError, match="cannot be stored as int64"):
        numbers[:4][1:] = value  # views are checked too
    numbers[2:5] = np.arange(3, dtype=np.int32)
    numbers[0], numbers[5] = 7, True
    assert numbers.tolist() == [7, 0, 0, 1, 2, 1]


def test_killed_producer_raises_and_slot_stays_writing() -> None:
    ring = SlotRing(SPEC, 1)
    producer = ProducerProcess(ring, Draws(pause=30))
    with pytest.raises(ProducerError, match=r"signal 9|SIGKILL"), FIFOReader(ring, [producer]) as reader:
        deadline = time.monotonic() + 20
        while ring.slots[0].state != SlotState.WRITING and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(producer.pid, signal.SIGKILL)
        read(reader, 1)
    assert ring.slots[0].state == SlotState.WRITING


def test_hung_producer_is_ended() -> None:
    ring = SlotRing(SPEC, 1)
    producer = ProducerProcess(ring, Draws(pause=60), timeout=1.0)
    with (
        pytest.raises(ProducerError, match="wrote no record for 1 s"),
        FIFOReader(ring, [producer]) as reader,
    ):
        read(reader, 1)


def test_producer_exits_with_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time
            sys.path.insert(0, sys.argv[1])
            from tests.support.slots.examples import SPEC, Draws, Numbers
            from whorl.slots import *
            spec = Spec.from_dataclass(Numbers, N=5)
            ring = SlotRing(spec, 2)
            producer = ProducerProcess(ring, Draws())
            next(FIFOReader(ring, [producer]))
            print(producer.pid, flush=True)
            time.sleep(60)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script), str(ROOT)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_slot_transitions_checked_and_freed_memory_poisoned() -> None:
    ring = SlotRing(SPEC, 1, poison=True)
    slot = ring.slots[0]
    assert np.isnan(slot.data.values).all() and int(slot.data.label) == -1
    with pytest.raises(ProducerError, match="slot 0 is FREE"):
        slot.transition(SlotState.READY, SlotState.READING)
    with FIFOReader(ring, [SerialProducer(ring, Draws())]) as reader:
        first = next(reader)
        kept = first.data.values  # a view that is kept too long
        assert not np.isnan(kept).any() and first.state == SlotState.READING and first.length == 5
        ring.release(first)
        assert np.isnan(kept).all()


def test_slot_tensors_share_memory() -> None:
    slot = SlotRing(SPEC, 1).slots[0]
    slot.data.values[:] = 3.0
    assert slot.tensors()["values"].tolist() == [3.0] * 5
