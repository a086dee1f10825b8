"""Times the parts of the engine's decoding steps in each way to run them, for `whorl machine`.

An engine with random weights decodes some rows. Each way of its step (torch; the native step by vectors or tiles, with one
thread and with all) runs a few steps of them, and the fastest one counts. The native step times its own phases
(`layout.PARTS`); the engine times model, sampler, and the whole step.

    embedding ... head      phases of the native step; "model" for torch, whose phases are not timed
    call                    the model outside of the phases: Python, ctypes, allocation of the logits
    sampler                 tokens and log-probabilities from logits
    scheduler, outputs      the engine's Python before and after

The bound of a part is the larger of its FLOPs over the GEMM rate and its bytes over the bandwidth of a copy of as many bytes
as the whole step moves. A part above 100 % had its data in a cache. The sampler draws at temperature 1 without a cut: random
weights give flat distributions, in which top-p keeps most ids.

The calling thread times the phases. If other processes hold its core, the helper threads do its work, and the phases look
short and the call long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.native import unsupported_reason
from whorl.engine.native.candidates import WEIGHT_DTYPES
from whorl.engine.native.runner import NativeRunner, Setting, apply_way, autotune, step_ways
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models import TransformerConfig, make_model
from whorl.models.transformer_cost import attention_layers, linear_shapes
from whorl.train.profiling.products import Bounds
from whorl.train.profiling.step_parts import StepPart, StepTable

CONTEXT = 128  # tokens in the cache of each row
STEPS = 8  # of each way; the first warms up
NEW_TOKENS = 64  # room for the steps of all ways
BLOCK_SIZE = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
PHASES = {"q": "qkv", "kv": "qkv"}  # linear layers whose phase has another name
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0)
Cost = tuple[float, float, str]  # FLOPs, bytes, type


def decoding_steps(
    config: TransformerConfig, bounds: Mapping[int, Bounds], rows: Sequence[int]
) -> Iterator[StepTable]:
    """Yield the table of a step for each type of weights and number of rows. bounds: by number of threads."""
    for kind in WEIGHT_DTYPES:
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        network = make_model(config, torch.Generator().manual_seed(0), dtype).eval().requires_grad_(False)
        if kind == "int8" and unsupported_reason(network) is not None:
            continue  # torch has no int8 weights
        length = min(CONTEXT + NEW_TOKENS, network.max_positions or CONTEXT + NEW_TOKENS)
        settings = EngineConfig(
            max_num_seqs=max(rows), max_model_len=length, block_size=BLOCK_SIZE, enable_prefix_caching=False,
            kv_cache_tokens=max(rows) * (length + BLOCK_SIZE), max_num_batched_tokens=2048,
            max_decode_slowdown=math.inf, weight_dtype="int8" if kind == "int8" else None,
        )  # fmt: skip
        engine = Engine(network, settings)
        for n in rows:
            yield _time_rows(engine, kind, n, length - NEW_TOKENS, bounds)


def _time_rows(engine: Engine, kind: str, n: int, context: int, bounds: Mapping[int, Bounds]) -> StepTable:
    runner = engine.runner
    native = runner if isinstance(runner, NativeRunner) else None
    chosen = "torch" if native is None else autotune(native, kind == "int8", n)
    ways: dict[str, Setting] = {"torch": None} if native is None else step_ways(native, kind == "int8")
    vocabulary = engine.model.config.vocab_size
    for row in range(n):
        ids = tuple((31 * row + 7 * at) % vocabulary for at in range(context))
        engine.add(Request(id=f"{n} {row}", ids=ids, max_tokens=NEW_TOKENS, sampling=SAMPLING))
    while not all(sequence.decoding for sequence in engine.sequences()):
        engine.step()
    times = dict[str, dict[str, float]]()
    for way, setting in ways.items():
        if native is not None:
            apply_way(native, setting)
        times[way] = min((_time_step(engine) for _ in range(STEPS)), key=lambda parts: sum(parts.values()))
    for sequence in engine.sequences():
        engine.abort(sequence.request.id)
    engine.step()
    setting = ways[chosen]
    bound = bounds[max(bounds) if setting is None else setting[1]]
    floors = bound_seconds(step_costs(engine.model.config, kind, n, context), bound)
    parts = [
        StepPart(
            name, seconds, floors.get(name, 0.0), chosen if name in floors else "",
            {way: other[name] for way, other in times.items() if way != chosen and name in other},
        )
        for name, seconds in times[chosen].items()
    ]  # fmt: skip
    others = {way: sum(other.values()) for way, other in times.items() if way != chosen}
    name = f"decoding step, {n} rows of {context} tokens, {kind}"
    return StepTable(name, sum(times[chosen].values()), parts, chosen, others)


def _time_step(engine: Engine) -> dict[str, float]:
    """Run a step; return the seconds of its parts."""
    runner, phases = engine.runner, dict[str, float]()
    context: AbstractContextManager[dict[str, float]] = nullcontext(phases)
    if isinstance(runner, NativeRunner) and runner.use_native:
        context = runner.native_step.profiled()
    with context as phases:
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
    done = engine.stats.recent_steps[-1]
    model = {**phases, "call": max(0.0, done.model_seconds - sum(phases.values()))}
    return {
        **(model if phases else {"model": done.model_seconds}),
        "sampler": done.sample_seconds,
        "scheduler, outputs": seconds - done.model_seconds - done.sample_seconds,
    }


def step_costs(config: TransformerConfig, kind: str, rows: int, context: int) -> dict[str, Cost]:
    """Return FLOPs, least bytes and type of each part of a decoding step with weights of this type.

    Bytes are the weights, the cache's keys and values, and the fp32 input and output of each part.
    """
    wide, item = config.d_model, ITEM_BYTES[kind]
    narrow = "float32" if kind == "float32" else "bfloat16"  # of the cache
    found: dict[str, Cost] = {}

    def add(name: str, flops: float, n_bytes: float, dtype: str) -> None:
        before = found.get(name, (0.0, 0.0, dtype))
        found[name] = before[0] + flops, before[1] + n_bytes, dtype

    add("embedding", 0.0, 8.0 * rows * wide, "float32")
    for name, (n, k, calls) in linear_shapes(config).items():
        bare = name.partition(" ")[0]
        add(
            PHASES.get(bare, bare),
            2.0 * calls * rows * n * k,
            calls * (item * n * k + 4.0 * rows * (n + k)),
            kind,
        )
    for mixer in attention_layers(config):
        keys = min(context, mixer.window or context)
        flops = 4.0 * rows * mixer.n_heads * keys * mixer.head_dim
        add(
            "attention",
            flops,
            2.0 * rows * mixer.n_kv_heads * keys * mixer.head_dim * ITEM_BYTES[narrow],
            narrow,
        )
    add("norms", 0.0, 16.0 * config.n_layers * rows * wide, "float32")
    add(
        "head", 2.0 * rows * config.vocab_size * wide,
        config.vocab_size * (item * wide + 4.0 * rows) + 4.0 * rows * wide, kind,
    )  # fmt: skip
    add("sampler", 0.0, 4.0 * rows * config.vocab_size, "float32")
    model = [cost for name, cost in found.items() if name != "sampler"]
    found["model"] = sum(c[0] for c in model), sum(c[1] for c in model), kind
    return found


def bound_seconds(costs: Mapping[str, Cost], bound: Bounds) -> dict[str, float]:
    """Return the bound of each part."""
    moved = costs["model"][1] + costs["sampler"][1]
    bandwidth = bound.bandwidth[bound.size(moved)]
    return {
        name: max(work / bound.flops[dtype], n_bytes / bandwidth)
        for name, (work, n_bytes, dtype) in costs.items()
    }
