"""Acceptance rate and speed of speculation: the same prompts with and without drafts, in alternation.

    acceptance rate  = drafts accepted / drafts made
    tokens per step  = output tokens / steps that decode, 1 without drafts
    speed-up         = median over prompts of seconds without / seconds with

One sequence runs at a time: drafts save the most there, since a step is bound by reading the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.load import load_for_sampling
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculation.load import Speculation, make_proposer
from whorl.machine.device_probe import Machine


@dataclass(frozen=True)
class SpeculationStats:
    """acceptance_rate, equal: fractions, of drafts and of prompts with equal tokens. Speeds: output tokens per second."""

    acceptance_rate: float
    tokens_per_step: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    draft_seconds_fraction: float
    equal: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_speculation(
    plain: Engine,
    speculative: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    params: SamplingParams = SamplingParams(temperature=0),  # noqa: B008  (frozen)
) -> SpeculationStats:
    """Return the figures of two engines of one model, the second with a proposer; greedy by default.

    Args:
        prompts: at least one; the first runs once more before the others, untimed.
    """
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    outputs: dict[str, list[list[int]]] = {"plain": [], "speculative": []}
    engines = {"plain": plain, "speculative": speculative}
    for engine in engines.values():
        engine.generate([prompts[0]], params, max_tokens=max_tokens, stop_ids=stop_ids)
    before = speculative.stats.counters()
    for ids in prompts:
        for name, engine in engines.items():
            engine.cache.invalidate_all()
            began = time.perf_counter()
            (found,) = engine.generate([ids], params, max_tokens=max_tokens, stop_ids=stop_ids)
            seconds[name].append(time.perf_counter() - began)
            outputs[name].append(found.ids)
    spent = {name: value - before[name] for name, value in speculative.stats.counters().items()}
    n_tokens = {name: sum(map(len, texts)) for name, texts in outputs.items()}
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["speculative"], strict=True)]
    same = [a == b for a, b in zip(outputs["plain"], outputs["speculative"], strict=True)]
    return SpeculationStats(
        acceptance_rate=spent["accepted_tokens"] / max(1.0, spent["drafted_tokens"]),
        tokens_per_step=n_tokens["speculative"] / max(1.0, spent["steps"]),
        tokens_per_second=n_tokens["speculative"] / sum(seconds["speculative"]),
        plain_tokens_per_second=n_tokens["plain"] / sum(seconds["plain"]),
        speedup=median(ratios),
        draft_seconds_fraction=spent["draft_seconds"] / sum(seconds["speculative"]),
        equal=sum(same) / len(same),
    )


def measure_folder(
    folder: Path,
    speculation: Speculation,
    prompts: Sequence[Sequence[int]],
    *,
    machine: Machine,
    banned_ids: list[int],
    max_tokens: int,
    stop_ids: Collection[int] = (),
    params: SamplingParams = SamplingParams(temperature=0),  # noqa: B008  (frozen)
) -> SpeculationStats:
    """Return the figures of the model in `folder`, loaded as for serving.

    Raises:
        As `Speculation.load_draft` and `make_proposer`.
    """
    model = load_for_sampling(folder, machine)
    draft = speculation.load_draft(model, machine, 1)
    sizes = EngineConfig(
        max_num_seqs=1, max_model_len=max(map(len, prompts)) + max_tokens, max_decode_slowdown=math.inf
    )
    proposer = make_proposer(speculation, folder, model, draft, sizes, banned_ids)
    plain, speculative = (Engine(model, sizes, banned_ids=banned_ids, proposer=p) for p in (None, proposer))
    return measure_speculation(
        plain, speculative, prompts, max_tokens=max_tokens, stop_ids=stop_ids, params=params
    )
