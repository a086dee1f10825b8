"""The engine as the benchmarks run it, by weight format.

    engine = made("109M", "int8", EngineConfig(...), threads=2)

A kind is a dtype of the torch path, or a format of the packed weights of the native step where it can be built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from bench.engine.support import models
from bench.engine.support.peers import DTYPES, Sizes

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.machine.kernel_choice import force_choices, forced_choices
from whorl.models.transformer import Transformer

BATCH = 512  # tokens per step; with more, activations leave the second-level cache
GREEDY = SamplingParams(temperature=0)
# Name -> (dtype of the torch path and of the cache, weight_dtype of the native step; None for the torch path).
KINDS: dict[str, tuple[torch.dtype, str | None]] = {
    "torch float32": (torch.float32, None),
    "torch bfloat16": (torch.bfloat16, None),
    "float32": (torch.float32, "float32"),
    "bfloat16": (torch.bfloat16, "bfloat16"),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}
STORED = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 32}


def kinds() -> list[str]:
    """The kinds available on this machine, exact ones first."""
    native = "weight_dtype" in EngineConfig.model_fields and forced_choices().get("cpu") != "torch"
    if native:
        from whorl.engine.cpu.build import library

        native = library() is not None
    return [name for name, (_, weights) in KINDS.items() if weights is None or native]


def best_kind() -> str:
    """The default kind: bfloat16 by the native step if available, else torch in fp32."""
    return "bfloat16" if "bfloat16" in kinds() else "torch float32"


def bytes_per_weight(kind: str) -> float:
    """Stored bytes per weight of a kind."""
    return STORED[kind.removeprefix("torch ")]


def made(
    name: str | Transformer, kind: str, config: EngineConfig, threads: int = 2, **options: object
) -> Engine:
    """An engine over "14M" or "109M" (or a network), in `kind`."""
    dtype, weights = KINDS[kind]
    torch.set_num_threads(threads)
    network = models.model(name, dtype) if isinstance(name, str) else name
    if weights is not None:
        config = config.model_copy(update={"weight_dtype": weights})
    with force_choices({"cpu": "torch" if weights is None else "native"}):
        return Engine(network, config, **options)  # type: ignore[arg-type]


def ask(number: int, ids: Sequence[int], max_tokens: int) -> Request:
    """A greedy request."""
    return Request(id=str(number), ids=tuple(ids), max_tokens=max_tokens, sampling=GREEDY)


class Ours:
    """The engine as a contender of `bench/engine/throughput.py`, with the path and the threads that it chooses.

    As with the peers, settings are those for throughput: decoding rows wait for the prompts of the others.

    Args:
        kind: fp32, bf16 or int8; with "-kv8", the KV cache is in int8.
    """

    def __init__(self, name: str, kind: str, sizes: Sizes, threads: int) -> None:
        torch.set_num_threads(threads)
        self.n_requests = 0
        weights = kind.removesuffix("-kv8")
        config = EngineConfig(
            max_num_seqs=sizes.rows, max_model_len=sizes.length, kv_cache_tokens=sizes.tokens + 32 * sizes.rows,
            enable_prefix_caching=False, weight_dtype="int8" if weights == "int8" else None,
            kv_cache_dtype="model" if weights == kind else "int8", max_num_batched_tokens=BATCH,
            max_decode_slowdown=math.inf,
        )  # fmt: skip
        self.engine = Engine(models.model(name, DTYPES[weights]), config)

    def run(self, prompts: models.Rows, n_new: int) -> models.Rows:
        """Greedy continuations of `n_new` ids each."""
        out: dict[str, list[int]] = {}
        for ids in prompts:
            request = ask(self.n_requests, ids, n_new)
            self.n_requests += 1
            out[request.id] = []
            self.engine.add(request)
        while self.engine.busy:
            for delta in self.engine.step():
                out[delta.request_id] += [token.id for token in delta.tokens]
        return list(out.values())
