"""Several engines in one thread, as one `EngineProtocol`: a request names its engine in `Request.model`.

The engines step in turn, so all of them use all threads, and a step of one delays the others by its own time.
"""

from __future__ import annotations

from collections.abc import Mapping

from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request


class EngineGroup:
    """Engines by name. Request ids are unique over all of them."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = dict(engines)

    @property
    def busy(self) -> bool:
        """Whether an engine has unfinished requests."""
        return any(engine.busy for engine in self.engines.values())

    def add(self, request: Request) -> None:
        """Add a request to its engine. Raises ConfigError: as `Engine.add`."""
        self.engines[request.model].add(request)

    def step(self) -> list[Delta]:
        """Run one step of each engine that has requests; returns the deltas of all."""
        return [delta for engine in self.engines.values() if engine.busy for delta in engine.step()]

    def abort(self, request_id: str) -> bool:
        """End a request, as `Engine.abort`."""
        return any(engine.abort(request_id) for engine in self.engines.values())


def engine_of(engine: object, model: str = "") -> object:
    """Return the engine of a model; of a group the first one by default."""
    if not isinstance(engine, EngineGroup):
        return engine
    return engine.engines.get(model) or next(iter(engine.engines.values()))
