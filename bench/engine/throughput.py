"""Tokens/s of the engine against vLLM, OpenVINO GenAI, llama.cpp and Hugging Face, with the same weights and number type.

    python bench/engine/throughput.py --peer vllm=/PATH/bin/python --peer openvino=/PATH/bin/python
        [--models 14M,109M] [--cells 1,8,32,128,prefill] [--kinds fp32,bf16,int8,int8-kv8] [--only ours,vllm]
        [--rounds 3] [--quick]

Cells 1, 8 and 32: so many prompts of 128 random ids, present at the start, and 128 new tokens each, greedy, no end token.
128: prompts of 32, 64 new tokens. prefill: 8 prompts of 1,024 ids, one new token each, counted in prompt tokens. Prefill is
always part of the time; prefix caches are off.

int8-kv8 is int8 with our KV cache in int8 too. OpenVINO's default cache has 8 bits (KV_CACHE_PRECISION u8) in every type but
fp32, so there the types are equal; in bf16 and int8 ours has 16 bits. The other peers have no int8 cache on a CPU here.

Every contender runs alone in a separate process, with two threads; the best round counts. The engine and the peers run
at their own choices of kernels. The table ends with the ratio to the fastest peer of the same type. Bar: 1.2 with AMX, 1.3
without. "same ids" is the share of ids that equal ours in fp32 (or in the first type measured). In fp32, at least 90 % of
the first tokens must be equal.

--peer NAME=PYTHON gives the interpreter of vllm, openvino, llama or hf; the default is this one. A peer that its interpreter
cannot import is left out. Installation: docs/engine.md. --folder DIR keeps the peers' files.

--quick: 14M, 8 rows, 32 new tokens, one round, fp32 and int8. Where OpenVINO is installed, vLLM and Hugging Face are left
out, which were slower in this cell on every machine so far.

llama.cpp crashes on CPUs with AMX (ggml-org/llama.cpp issue 20824). There it must be built without it:
CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF".
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._peers import ENGINES, TITLES, environment, interpreters
from bench._run import claim, parse, sized, smoke
from bench.engine.support import contender, models
from bench.engine.support.contender import Job, Outcome
from bench.engine.support.peers import GGUF_NAMES

THREADS, TIMEOUT = 2, 900
KINDS = (*GGUF_NAMES, "int8-kv8")
INT8_CACHE_PEERS = ("openvino",)
NAMES = {"14M": "13.8 M", "109M": "109.5 M"}
# Name -> rows, prompt length, new tokens.
CELLS = {
    "1": (1, sized(128, 16), 128),
    "8": (8, sized(128, 16), 128),
    "32": (32, 128, 128),
    "128": (128, 32, 64),
    "prefill": (8, 1024, 1),
}
MIN_FIRST_IDS = 0.9  # share of first tokens that must be equal in fp32


@dataclass(frozen=True)
class Cell:
    """A shape of work of one model. In a prefill, the prompt's tokens count; otherwise the new ones."""

    model: str
    name: str
    rows: int
    prompt: int
    n_new: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.n_new if self.n_new > 1 else self.prompt)

    def prompts(self) -> models.Rows:
        return models.prompts(self.model, self.rows, self.prompt)


@dataclass(frozen=True)
class Result:
    """One contender in one cell: tokens/s of each round, and the ids of the last."""

    side: str
    kind: str
    version: str
    speeds: list[float]
    ids: models.Rows

    @property
    def best(self) -> float:
        return max(self.speeds)


def measure(job: Job, python: str, cells: Sequence[Cell], scratch: Path) -> list[Result] | None:
    """Run one contender, a result for each cell; None, and a line, if it failed. Raises SystemExit if the engine failed."""
    file, log = scratch / "job.json", scratch / "job.log"
    file.write_text(json.dumps(asdict(job)))
    ended = f"no result after {TIMEOUT} s"
    with log.open("w") as output, suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [python, contender.__file__, str(file)],
            env=environment(python, THREADS), stdout=output, stderr=output, timeout=TIMEOUT,
        )  # fmt: skip
        ended = f"exit code {done.returncode}" if done.returncode else ""
    if ended:
        lines = log.read_text(errors="replace").strip().splitlines()
        why = f"{job.side} {job.kind}, {job.model}: {ended}: {(lines or ['nothing'])[-1][:300]}"
        if job.side == "ours":
            sys.exit(why)
        print(f"left out: {why}")
        return None
    outcome = Outcome(**json.loads(file.with_suffix(".out").read_text()))
    rows = zip(cells, outcome.seconds, outcome.ids, strict=True)
    return [
        Result(job.side, job.kind, outcome.version, [cell.tokens / s for s in seconds], ids)
        for cell, seconds, ids in rows
    ]


def share_equal(a: models.Rows, b: models.Rows, n: int | None = None) -> float:
    """Share of equal ids among the first `n` of each row."""
    pairs = [x == y for one, two in zip(a, b, strict=True) for x, y in zip(one[:n], two[:n], strict=True)]
    return sum(pairs) / len(pairs)


def by_kind(found: Sequence[Result]) -> list[tuple[Result, list[Result]]]:
    """Ours and the peers, the fastest first, of each type."""
    ours = [result for result in found if result.side == "ours"]
    return [
        (own, sorted((r for r in found if r.kind == own.kind and r is not own), key=lambda r: -r.best)) for own in ours
    ]  # fmt: skip


def show(cell: Cell, found: Sequence[Result]) -> list[str]:
    """Print a line for each contender of a cell. Returns what is wrong with the ids in fp32."""
    wrong = []
    for own, peers in by_kind(found):
        for result in (own, *peers):
            name = f"{NAMES[cell.model]:>8}  {cell.name:>7}  {own.kind}  {TITLES.get(result.side, 'ours'):21}"
            ratio = f"ours / it {own.best / result.best:5.2f}" if result is not own else " " * 15
            same = share_equal(result.ids, found[0].ids)
            print(
                f"{name} {result.best:10,.1f}  {ratio}  same ids {same:4.0%}  {[round(s) for s in result.speeds]}"
            )
            if own.kind == "fp32" and (first := share_equal(result.ids, own.ids, 1)) < MIN_FIRST_IDS:
                wrong.append(f"{name}: {first:.0%} of the first ids are ours")
    return wrong


def claims(cell: Cell, found: Sequence[Result], quick: bool) -> None:
    """Print a claim for each type that has a peer; under `--smoke` for every type."""
    amx = bool(torch.cpu._is_amx_tile_supported())  # type: ignore[attr-defined]
    size, what = cell.model.replace("109M", "110M"), f"{cell.rows} rows, {cell.prompt} in, {cell.n_new} out"
    if cell.n_new == 1:
        what = f"prefill of {cell.rows} x {cell.prompt:,}"
    for own, peers in by_kind(found):
        if not peers and not smoke():
            continue
        best = peers[0] if peers else replace(own, side="none", version="")
        bar = 1.2 if amx else 1.3
        claim(
            f"engine, {NAMES[cell.model]} parameters, {own.kind}, {what}", ours=round(own.best, 1), peer=round(best.best, 1),
            unit="tokens/s", ratio=own.best / best.best, bar=bar, ok=own.best >= bar * best.best, quick=quick,
            variant=f"{size}-{cell.name}-{own.kind}", peer_name=f"{TITLES.get(best.side, '')} {best.version}".strip(),
            samples=[{r.side: [round(s, 1) for s in r.speeds] for r in (own, *peers)}],
        )  # fmt: skip


def product_rate(kind: str) -> float:
    """FLOP/s of a square product of this type on all threads: torch's, int8 with int32 sums; in fp32 torch's or numpy's."""
    torch.set_num_threads(THREADS)
    n = sized(2048, 256)
    if kind.startswith("int8"):
        a, b = (torch.randint(-9, 9, (n, n), dtype=torch.int8) for _ in range(2))
        ways: list[Callable[[], object]] = [partial(torch._int_mm, a, b)]
    else:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        ways = [partial(torch.mm, a, b)]
        if kind == "fp32":
            ways.append(partial(np.matmul, a.numpy(), b.numpy()))
    best = math.inf
    for multiply in ways * 8:
        began = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def bound_claims(cell: Cell, found: Sequence[Result], quick: bool) -> None:
    """Print the larger model's share of the bound of its products alone with 32 rows, and with attention in prefill.

    A prefill's bar is the share at which its ratio to the best peer is met, which may be above 1.
    """
    if cell.model != "109M" or cell.name not in ("32", "prefill"):
        return
    shape = models.config(cell.model)
    head = shape.vocab_size * shape.d_model
    layer = 4 * shape.d_model**2 + 3 * shape.d_model * shape.mlp_hidden
    positions = cell.rows * (cell.prompt + cell.n_new)
    flops = 2 * (positions * shape.n_layers * layer + cell.rows * cell.n_new * head)
    amx = torch.cpu._is_amx_tile_supported()  # type: ignore[attr-defined]
    if cell.name == "prefill":  # and attention, a tenth of it: scores and values of earlier keys
        flops += 2 * cell.rows * cell.prompt**2 * shape.d_model * shape.n_layers
    for own, peers in by_kind(found):
        bound = cell.tokens * product_rate(own.kind) / flops
        bar, what = 0.5 if amx else 0.7, f"{cell.rows} rows"
        if cell.name == "prefill":
            what = f"prefill of {cell.rows} x {cell.prompt:,}"
            if peers:
                bar = (1.2 if amx else 1.3) * peers[0].best / bound
        claim(
            f"engine, {NAMES[cell.model]} parameters, {own.kind}, {what}: share of the GEMM bound",
            ours=round(own.best, 1), peer=round(bound, 1), unit="tokens/s", ratio=own.best / bound, bar=round(bar, 2),
            ok=own.best >= bar * bound, quick=quick, variant=f"110M-{cell.name}-{own.kind}-gemm",
            peer_name="products alone" if cell.name == "32" else "products and attention alone",
        )  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--models", default="14M,109M")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", default="", help="contenders; ours always runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)


def main() -> None:
    small = {"quick": True, "cells": "1,8"}
    given = parse(__doc__, arguments, smoke=small)
    if given.quick:
        given.models, given.rounds = "14M", 1
        given.cells = given.cells if given.cells != ",".join(CELLS) else "8"
        given.kinds = given.kinds if smoke() or given.kinds != ",".join(KINDS) else "fp32,int8"
    pythons = {"ours": sys.executable} | interpreters(given.peer, ENGINES, THREADS)
    if len(pythons) == 1 and not smoke():
        print("skipped: no peer is installed (--peer NAME=PYTHON)")
        sys.exit(77)
    if given.only:
        pythons = {side: p for side, p in pythons.items() if side == "ours" or side in given.only.split(",")}
    elif given.quick and "openvino" in pythons:
        pythons = {side: p for side, p in pythons.items() if side not in ("vllm", "hf")}
    for option, allowed in (("models", NAMES), ("cells", CELLS), ("kinds", KINDS)):
        for text in getattr(given, option).split(","):
            if text not in allowed:
                sys.exit(f"--{option} {text}: expected some of {','.join(allowed)}")
    kinds = given.kinds.split(",")
    table: dict[Cell, list[Result]] = {}
    with tempfile.TemporaryDirectory() as spare:
        for model in given.models.split(","):
            # llama.cpp makes q8_0 from f32
            ggufs = (
                [{"int8": "f32"}.get(kind, GGUF_NAMES[kind]) for kind in kinds if kind in GGUF_NAMES]
                if "llama" in pythons
                else []
            )
            files = models.write_files(given.folder or Path(spare), model, ggufs)
            cells = []
            for name in given.cells.split(","):
                rows, prompt, n_new = CELLS[name]
                cells.append(
                    Cell(model, name, rows, prompt, sized(32, 4) if given.quick and n_new > 32 else n_new)
                )
            batches = [(cell.prompts(), cell.n_new) for cell in cells]
            for kind in kinds:
                for side, python in pythons.items():
                    if side == "hf" and kind == "int8":
                        continue  # `generate` has no int8 on a CPU
                    if kind not in GGUF_NAMES and side not in ("ours", *INT8_CACHE_PEERS):
                        continue
                    job = Job(side, kind, model, str(files), batches, given.rounds, THREADS)
                    print(f"{time.strftime('%X')} {model} {kind} {side}", file=sys.stderr, flush=True)
                    for cell, result in zip(
                        cells, measure(job, python, cells, Path(spare)) or [], strict=False
                    ):
                        table.setdefault(cell, []).append(result)
    wrong = [line for cell, found in table.items() for line in show(cell, found)]
    for cell, found in table.items():
        claims(cell, found, given.quick)
        bound_claims(cell, found, given.quick)
    if wrong:
        sys.exit("ids in fp32 differ:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
