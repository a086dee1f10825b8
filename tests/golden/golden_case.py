"""The registry of golden cases, what a case returns, and the settings under which every case runs.

A case is a function with a stable name. It trains, samples or describes something tiny and returns a `Result`:

    bits    sha256 of weights or log-probabilities. Equal on one machine only: other CPUs round differently.
    exact   sha256 of results without rounding: merges, parameter names, help texts. Equal on every machine.
    ids     digests of sampled token ids, one for each request. Equal on other machines up to rare ties.
    curve   one float per training step. Equal on other machines within the case's tolerance.

`tools/compare_golden.py` compares all four between two commits on one machine. `test_golden.py` compares the last three with
`golden.json` on any machine.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor, nn

from whorl.train.determinism import deterministic

TOLERANCE = 1e-4  # relative, of a curve
# Replaces every choice that is measured at run time: the engine's runner, the device, the type and the threads.
ENVIRONMENT = {
    "WHORL_CHOOSE": "cpu=torch",
    "WHORL_DEVICE": "cpu",
    "WHORL_DTYPE": "float32",
    "WHORL_THREADS": "1",
}
ENVIRONMENT |= {"COLUMNS": "100", "TERM": "dumb"}


@dataclass
class Result:
    """What a case returns; see the top of this file."""

    bits: dict[str, str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)

    def hashes(self) -> dict[str, str]:
        """One sha256 for each part of the result, by the part's name."""
        found = {**self.bits, **self.exact}
        found |= {f"{name} ids": text_hash(" ".join(digests)) for name, digests in self.ids.items()}
        if self.curve:
            found["curve"] = text_hash(" ".join(map(repr, self.curve)))
        return found


@dataclass(frozen=True)
class Case:
    """A registered case. slow: it takes more than a few seconds, and `test_golden.py` leaves it out."""

    name: str
    run: Callable[[], Result]
    tolerance: float = TOLERANCE
    slow: bool = False

    def __call__(self) -> Result:
        with fixed():
            return self.run()


CASES: dict[str, Case] = {}


Run = Callable[[], Result]


def case(name: str, *, tolerance: float = TOLERANCE, slow: bool = False) -> Callable[[Run], Run]:
    """Register a function as the case `name`. Names are compared across commits, so they never change."""

    def register(run: Run) -> Run:
        assert name not in CASES, name
        CASES[name] = Case(name, run, tolerance, slow)
        return run

    return register


@contextmanager
def fixed(**environment: str) -> Iterator[None]:
    """Within it, nothing that is measured or machine-dependent decides a result: one thread, fixed libraries."""
    with patch.dict(os.environ, {**ENVIRONMENT, **environment}), deterministic():
        yield


def text_hash(text: str) -> str:
    """sha256 of a text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest(ids: Iterable[int]) -> str:
    """The first 8 hex digits of the sha256 of token ids."""
    return text_hash(",".join(map(str, ids)))[:8]


def hashed_name(name: str) -> str:
    """The name of a parameter of the project's own decoder when the cases were written."""
    name = name.replace("mixer_norm", "attention_norm").replace("mixer.smear.share", "attention.smear")
    return re.sub(r"([.:])mixer([.:])", r"\1attention\2", name)


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names."""
    found = hashlib.sha256()
    if any(re.search(r"[.:]mixer[.:]qkv\b", name) for name in tensors):
        tensors = {hashed_name(name): tensor for name, tensor in tensors.items()}
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def weight_hash(module: nn.Module) -> str:
    """`tensor_hash` of all parameters and buffers."""
    return tensor_hash({**dict(module.named_parameters()), **dict(module.named_buffers())})
