"""Six faults of event systems, each planted in a simulated world."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

from whorl.log.port import OffsetRemovedError
from whorl.loop.counter.likes import LikesView
from whorl.loop.simulation import SimulatedLog, SimulatedViews, SimulatedWorld
from whorl.loop.streams.view import ViewEffect


class OffsetBeforeEffect(SimulatedWorld):
    """The offset is committed before the rows."""

    class store_type(SimulatedViews):
        @contextmanager
        def batch(self, view, moves, epochs, partitions=()):
            with super().batch(view, moves, epochs, partitions):
                pass
            with super().batch(view, {}, epochs, partitions) as state:
                yield state


class NoFence(SimulatedWorld):
    """A worker that slept continues where it was."""

    class store_type(SimulatedViews):
        def check_fence(self, place, found, own):
            pass


class BlindIncrement(SimulatedWorld):
    """Each like adds one, also a repeated one of the same actor."""

    class _Blind(LikesView):
        def apply(self, state, items):
            for item in items:
                if item.value.kind == "like":
                    cells = state.get("counts", item.value.answer, {"cells": {}})["cells"]
                    n = cells.get("0", [0, 0, 0])[1] + 1
                    row = {"likes": n, "dislikes": 0, "cells": {"0": [n, n, 0]}}
                    state.put("counts", item.value.answer, row)
                    yield ViewEffect("count", item.value.answer, {"partition": "0", "cell": [n, n, 0]})

    view = _Blind()


class RetryUnderNewId(SimulatedWorld):
    """Every delivery has an id of its own."""

    def delivery(self, click):
        self.points["delivery"] = self.points.get("delivery", 0) + 1
        return dataclasses.replace(click, id=f"{click.id}, delivery {self.points['delivery']}")


class SkippedSequenceValue(SimulatedWorld):
    """An offset is given before its record is visible, as by a sequence of a database."""

    class log_type(SimulatedLog):
        def fetch(self, topic, partition, offset, limit=1000):
            found = super().fetch(topic, partition, offset, limit)
            recent = self.history[-3:]  # the writer of every fifth record is slow
            hidden = [r for r in recent if r.topic == topic and r.offset % 5 == 4]
            return [record for record in found if record not in hidden]


class SilentJump(SimulatedWorld):
    """A reader whose offset was removed goes to the first that is left."""

    class log_type(SimulatedLog):
        def fetch(self, topic, partition, offset, limit=1000):
            try:
                return super().fetch(topic, partition, offset, limit)
            except OffsetRemovedError as error:
                return super().fetch(topic, partition, error.last + 1, limit)


FAULTS = (OffsetBeforeEffect, NoFence, BlindIncrement, RetryUnderNewId, SkippedSequenceValue, SilentJump)
