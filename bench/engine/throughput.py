"""New tokens a second, end to end, of ours, Hugging Face `generate` and llama.cpp, over the same weights.

.venv/bin/python bench/engine/throughput.py [--quick] [--models 14M,109M] [--batches 1,8,32] [--only ours,hf,llama]

Each cell: `batch` prompts of 128 random ids, all there at once, 128 new tokens each, greedy; prompts count. Every contender
runs in turn, `--rounds` times, and its median stands in the table. A side's best type counts: the claims hold our best
beside their best. Two threads for everyone.

Bars, by what the machine can do (in bf16 with AMX, else fp32 is the faster type): at 32 rows 3 x (13.8 M) and 4 x (109.5 M)
Hugging Face, without AMX 2 x and 1.5 x; at 8 and 32 rows 2 x llama.cpp, without AMX 1 x; at one row no slower than
llama.cpp at 109.5 M, and at 13.8 M, where the overhead of a step decides, beside Hugging Face's compiled step.

--quick: 32 new tokens, one round, nothing compiled. Needs transformers, gguf and llama-cpp-python. --save FILE appends each
median as a JSON line, --folder DIR keeps the files of the peers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.engine.support import models
from bench.engine.support.ours import Ours, kinds
from bench.engine.support.peers import HuggingFace, LlamaCpp

THREADS, PROMPT = 2, 128
NAMES = {"14M": "13.8 M", "109M": "109.5 M"}
Run = Callable[[models.Rows, int], models.Rows]


@dataclass
class Contender:
    """One way to do the work: `run(prompts, n_new)` once `open` has been called."""

    side: str
    kind: str
    open: Callable[[], tuple[Run, Callable[[], None]]]


def contenders(files: models.Files, batch: int, n_new: int, compiled: bool) -> list[Contender]:
    """All that take part in a cell."""

    def huggingface(dtype: torch.dtype, is_compiled: bool) -> Callable[[], tuple[Run, Callable[[], None]]]:
        def opened() -> tuple[Run, Callable[[], None]]:
            peer = HuggingFace(files.huggingface, dtype, THREADS, is_compiled)
            return peer.run, lambda: None

        return opened

    def llama(kind: str) -> Callable[[], tuple[Run, Callable[[], None]]]:
        def opened() -> tuple[Run, Callable[[], None]]:
            peer = LlamaCpp(files.gguf(kind), batch, PROMPT + n_new, THREADS)
            return peer.run, peer.close

        return opened

    def ours(kind: str, threads: int) -> Callable[[], tuple[Run, Callable[[], None]]]:
        def opened() -> tuple[Run, Callable[[], None]]:
            return Ours(files.name, kind, batch, PROMPT + n_new, threads).run, lambda: None

        return opened

    found = [Contender("ours", kind, ours(kind, THREADS)) for kind in kinds()]
    if batch == 1:  # where a step is small, a second thread may cost more than it brings
        found += [Contender("ours", f"{kind}, 1 thread", ours(kind, 1)) for kind in kinds()]
    found.append(Contender("hf", "fp32", huggingface(torch.float32, False)))
    found.append(Contender("hf", "bf16", huggingface(torch.bfloat16, False)))
    if batch == 1 and compiled:
        found.append(Contender("hf", "fp32 compiled", huggingface(torch.float32, True)))
        found.append(Contender("hf", "bf16 compiled", huggingface(torch.bfloat16, True)))
    found += [Contender("llama", kind, llama(kind)) for kind in ("f32", "bf16", "f16", "q8_0")]
    return found


def measure(
    taking: list[Contender], prompts: models.Rows, n_new: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each contender's runs, in turn; and how much of its text is that of the first contender."""
    opened = {f"{c.side} {c.kind}": c.open() for c in taking}
    for name, (run, _) in opened.items():
        run(prompts, n_new if "compiled" in name else 4)
    seconds: dict[str, list[float]] = {name: [] for name in opened}
    texts: dict[str, models.Rows] = {}
    for number in range(rounds):
        for name in list(opened) if number % 2 == 0 else list(reversed(opened)):
            began = time.perf_counter()
            rows = opened[name][0](prompts, n_new)
            seconds[name].append(time.perf_counter() - began)
            assert [len(row) for row in rows] == [n_new] * len(prompts), name
            texts[name] = rows
    for _, close in opened.values():
        close()
    first = next(iter(texts.values()))
    same = {
        name: sum(a == b for one, two in zip(rows, first, strict=True) for a, b in zip(one, two, strict=True))
        / (n_new * len(prompts))
        for name, rows in texts.items()
    }
    return seconds, same


def claims(table: dict[tuple[str, int], dict[str, float]], quick: bool) -> None:
    """The claim lines of what was measured."""
    amx = bool(torch.cpu._is_amx_tile_supported())  # type: ignore[attr-defined]

    def held(what: str, cell: tuple[str, int], side: str, bar: float) -> None:
        speeds = table.get(cell, {})
        ours = max((s for name, s in speeds.items() if name.startswith("ours")), default=None)
        peer = max((s for name, s in speeds.items() if name.startswith(side)), default=None)
        if ours is None or peer is None:
            return
        claim(
            f"{what} ({NAMES[cell[0]]}, {cell[1]} rows)", ours=round(ours, 1), peer=round(peer, 1), unit="tokens/s",
            ratio=ours / peer, bar=bar, ok=ours >= bar * peer, samples=[speeds], quick=quick,
        )  # fmt: skip

    for name, with_amx, without in (("14M", 3.0, 2.0), ("109M", 4.0, 1.5)):
        held("engine against Hugging Face generate", (name, 32), "hf", with_amx if amx else without)
        for batch in (8, 32):
            held("engine against llama.cpp", (name, batch), "llama", 2.0 if amx else 1.0)
    held("engine against llama.cpp", ("109M", 1), "llama", 1.0)
    held("engine against the compiled step", ("14M", 1), "hf", 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default="14M,109M")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--only", default="", help="contenders whose name begins with one of these")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    n_new, rounds = (32, 1) if given.quick else (128, given.rounds or 3)
    only = tuple(part for part in given.only.split(",") if part)
    torch.set_num_threads(THREADS)
    table: dict[tuple[str, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as spare:
        for name in given.models.split(","):
            files = models.Files(given.folder or Path(spare), name)
            for batch in map(int, given.batches.split(",")):
                taking = [
                    c
                    for c in contenders(files, batch, n_new, not given.quick)
                    if not only or f"{c.side} {c.kind}".startswith(only)
                ]
                found, same = measure(taking, models.prompts(name, batch, PROMPT), n_new, rounds)
                cell = {who: batch * n_new / statistics.median(times) for who, times in found.items()}
                table[name, batch] = cell
                for who, speed in cell.items():
                    spread = [round(batch * n_new / t, 1) for t in found[who]]
                    line = f"{NAMES[name]:>8} {batch:3d} rows  {who:19} {speed:8.1f} tokens/s"
                    print(f"{line}  same ids {same[who]:.0%}  {spread}", flush=True)
                    if given.save:
                        with given.save.open("a") as file:
                            line = {
                                "model": name,
                                "batch": batch,
                                "who": who,
                                "tokens_per_second": speed,
                                "runs": spread,
                            }
                            file.write(json.dumps(line) + "\n")
                gc.collect()
    claims(table, given.quick)


if __name__ == "__main__":
    main()
