"""The engine as the benchmarks run it: one place that knows what kinds of weights and steps there are.

    engine = made("109M", "bfloat16", EngineConfig(...), threads=2)

A kind is a compute type of torch's path, or `native` and a kind of packed weights where the machine can build that step.
"""

from __future__ import annotations

from collections.abc import Sequence

import _engine_models as models
import torch

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling import Sampling
from whorl.models.transformer import Transformer

GREEDY = Sampling(temperature=0)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def kinds() -> list[str]:
    """All that can run here."""
    return list(TYPES)


def bytes_per_weight(kind: str) -> float:
    """As stored."""
    return {"float32": 4.0, "bfloat16": 2.0}[kind]


def made(
    name: str | Transformer, kind: str, config: EngineConfig, threads: int = 2, **options: object
) -> Engine:
    """An engine over "14M" or "109M" (or a network), in `kind`."""
    torch.set_num_threads(threads)
    network = models.model(name, TYPES[kind]) if isinstance(name, str) else name
    return Engine(network, config, **options)  # type: ignore[arg-type]


def ask(number: int, ids: Sequence[int], max_tokens: int) -> Request:
    """A greedy request."""
    return Request(id=str(number), ids=tuple(ids), max_tokens=max_tokens, sampling=GREEDY)


class Ours:
    """The engine as a contender of `engine_throughput.py`."""

    def __init__(self, name: str, kind: str, rows: int, length: int, threads: int) -> None:
        self.threads, self.asked = threads, 0
        config = EngineConfig(
            max_sequences=rows, max_length=length, cache_tokens=rows * (length + 32), share_prefixes=False
        )
        self.engine = made(name, kind, config, threads)

    def run(self, prompts: models.Rows, n_new: int) -> models.Rows:
        """Greedy continuations of `n_new` ids each."""
        torch.set_num_threads(self.threads)
        out: dict[str, list[int]] = {}
        for ids in prompts:
            request = ask(self.asked, ids, n_new)
            self.asked += 1
            out[request.id] = []
            self.engine.add(request)
        while self.engine.busy:
            for delta in self.engine.step():
                out[delta.request_id] += [token.id for token in delta.tokens]
        return list(out.values())
