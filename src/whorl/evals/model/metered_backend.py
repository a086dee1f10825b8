"""Time, tokens, memory and energy of the requests that reach a model.

    metered = MeteredBackend(EngineBackend.open("quickstart/sft"))
    backend = CachedBackend(metered, cache)         requests that the cache answers cost nothing
    ...
    metered.cost()                                  field `cost` of results.json; the page compares quality with it

    seconds             in which requests were answered
    tokens_per_second   scored and generated tokens / seconds
    memory_bytes        largest resident set of this process, or memory of the GPU where one is used
    joules              energy of the processor packages (RAPL, Linux's powercap), where all of them can be read

Memory and energy are those of the whole process and machine. They are left out for an endpoint, which runs elsewhere.
A part of the energy would look like a saving. Where one package cannot be read, and with a GPU, whose energy these counters
do not include, the figure is left out for a reason (`no_energy`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from whorl.evals.model.requests import Completion, ModelBackend, Request, Response, Score, WrappedBackend

POWERCAP = Path("/sys/class/powercap")


class MeteredBackend(WrappedBackend):
    """See the top of this file.

    Args:
        local: whether the model runs in this process.
        powercap: folder of the energy counters.
    """

    def __init__(self, backend: ModelBackend, *, local: bool = True, powercap: Path = POWERCAP) -> None:
        super().__init__(backend)
        self.local = local
        self.seconds, self.n_tokens, self.joules = 0.0, 0, 0.0
        self._counters: list[EnergyCounter] = []
        self.no_energy = "the model runs elsewhere"  # why there is no figure; "" if there is one
        if local:
            self._counters, self.no_energy = energy_counters(powercap)

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`."""

        def count(index: int, response: Response) -> None:
            if isinstance(response, Score | Completion):
                self.n_tokens += len(response.ids)
            on_response(index, response)

        before, began = [each.read() for each in self._counters], time.perf_counter()
        try:
            self.backend.respond(requests, count)
        finally:
            self.seconds += time.perf_counter() - began
            for counter, start in zip(self._counters, before, strict=True):
                self._add_energy(counter, start)

    def cost(self) -> dict[str, float]:
        """Return what was measured; empty if no request reached the model."""
        if not self.seconds:
            return {}
        found = {"seconds": self.seconds}
        if self.n_tokens:
            found["tokens_per_second"] = self.n_tokens / self.seconds
        if self.local:
            gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            found["memory_bytes"] = float(gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if not self.no_energy:
            found["joules"] = self.joules
        return found

    def _add_energy(self, counter: EnergyCounter, start: int | None) -> None:
        end = counter.read()
        if start is None or end is None:
            self.no_energy = f"{counter.file} cannot be read any more"
        else:
            self.joules += ((end - start) % counter.wraps_at) / 1e6


class EnergyCounter:
    """One package's energy in microjoules. It starts again from 0 at `wraps_at`."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "energy_uj"
        self.wraps_at = int((folder / "max_energy_range_uj").read_text()) + 1

    def read(self) -> int | None:
        """Return the counter, or None if it cannot be read."""
        try:
            return int(self.file.read_text())
        except (OSError, ValueError):
            return None


def energy_counters(powercap: Path = POWERCAP) -> tuple[list[EnergyCounter], str]:
    """Return the counters of all processor packages; or none, and why the energy cannot be measured."""
    if torch.cuda.is_available():
        return [], "the energy of the GPU is not counted"
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):  # also the name of AMD's
        # "intel-rapl:0:1" is a part of a package.
        if folder.name.count(":") != 1 or not _is_package(folder):
            continue
        try:
            counter = EnergyCounter(folder)
        except (OSError, ValueError):
            return [], f"{folder} has no readable counter"
        if counter.read() is None:
            return [], f"{counter.file} cannot be read; Linux permits it to root"
        found.append(counter)
    return found, "" if found else f"no counters (RAPL) in {powercap}"


def _is_package(folder: Path) -> bool:
    """Return whether a counter is that of a package, not of the whole platform ("psys"), which has the packages in it."""
    try:
        return (folder / "name").read_text().startswith("package")
    except OSError:
        return True
