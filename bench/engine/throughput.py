"""End-to-end tokens/s of Whorl, Hugging Face `generate` and llama.cpp, over the same weights.

    python bench/engine/throughput.py [--quick] [--models 14M,109M] [--batches 1,8,32] [--only ours,hf,llama]

Each cell: `batch` prompts of 128 random ids, present at the start, and 128 new tokens each, greedy; prefill counts. The
contenders alternate `--rounds` times, and the table has their medians. The claims compare the best weight format of each
side. All use two threads.

Bars depend on the CPU: bf16 is the faster type with AMX, fp32 without.

    32 rows       3 x (13.8 M) and 4 x (109.5 M) Hugging Face; 2 x and 1.5 x without AMX
    8, 32 rows    2 x llama.cpp; 1 x without AMX
    1 row         1 x llama.cpp at 109.5 M; 1 x Hugging Face's compiled step at 13.8 M, where overhead per step dominates

--quick: 32 new tokens, one round, no compilation. Needs transformers, gguf and llama-cpp-python; `--smoke` runs without
llama-cpp-python. --log FILE appends each median as a JSON line. --folder DIR keeps the peers' files.

llama.cpp crashes on CPUs with AMX (ggml-org/llama.cpp issue 20824). There it must be built without it:
CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF".
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke
from bench.engine.support import models
from bench.engine.support.ours import Ours, kinds
from bench.engine.support.peers import HuggingFace, LlamaCpp

THREADS, PROMPT = 2, sized(128, 16)
NAMES = {"14M": "13.8 M", "109M": "109.5 M"}
PEERS = {"hf": "Hugging Face generate, best type", "llama": "llama.cpp, best type"}
Run = Callable[[models.Rows, int], models.Rows]


@dataclass
class Contender:
    """An implementation; `open` returns its `run(prompts, n_new)` and a function that closes it."""

    side: str
    kind: str
    open: Callable[[], tuple[Run, Callable[[], None]]]


def contenders(files: models.Files, batch: int, n_new: int, compiled: bool) -> list[Contender]:
    """The contenders of one cell."""

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
    if batch == 1:  # in a small step, the overhead of a second thread may exceed its gain
        found += [Contender("ours", f"{kind}, 1 thread", ours(kind, 1)) for kind in kinds()]
    found.append(Contender("hf", "fp32", huggingface(torch.float32, False)))
    found.append(Contender("hf", "bf16", huggingface(torch.bfloat16, False)))
    if batch == 1 and compiled:
        found.append(Contender("hf", "fp32 compiled", huggingface(torch.float32, True)))
        found.append(Contender("hf", "bf16 compiled", huggingface(torch.bfloat16, True)))
    if not smoke() or find_spec("llama_cpp"):
        found += [Contender("llama", kind, llama(kind)) for kind in ("f32", "bf16", "f16", "q8_0")]
    return found


def measure(
    chosen: list[Contender], prompts: models.Rows, n_new: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each contender's runs, and the share of its ids that equal the first contender's."""
    opened = {f"{c.side} {c.kind}": c.open() for c in chosen}
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


def claims(table: dict[tuple[str, int], dict[str, float]], n_new: int, quick: bool) -> None:
    """Print the claims for the measured cells."""
    amx = bool(torch.cpu._is_amx_tile_supported())  # type: ignore[attr-defined]

    def compare(cell: tuple[str, int], side: str, bar: float, variant: str) -> None:
        speeds = table.get(cell, {})
        # No peer runs in 4 bits here, so Whorl's int4 is shown in the table only.
        own = {
            name: speed for name, speed in speeds.items() if name.startswith("ours") and "int4" not in name
        }
        ours = max(own.values(), default=None)
        peer = max((s for name, s in speeds.items() if name.startswith(side)), default=None)
        if ours is None or peer is None:
            return
        claim(
            f"decoding {NAMES[cell[0]]} parameters, {cell[1]} rows, {PROMPT} in, {n_new} out",
            ours=round(ours, 1), peer=round(peer, 1), unit="tokens/s",
            ratio=ours / peer, bar=bar, ok=ours >= bar * peer, samples=[speeds], quick=quick,
            peer_name=PEERS[side], variant=variant,
        )  # fmt: skip

    for name, with_amx, without in (("14M", 3.0, 2.0), ("109M", 4.0, 1.5)):
        size = name.replace("109M", "110M")
        compare(
            (name, 32), "hf", with_amx if amx else without, f"{size}-32" + ("-hf" if name == "109M" else "")
        )
        for batch in (8, 32):
            variant = f"{size}-{batch}" + ("-llama" if name == "14M" else "")
            compare((name, batch), "llama", 2.0 if amx else 1.0, variant)
    compare(("109M", 1), "llama", 1.0, "110M-1")
    compare(("14M", 1), "hf", 1.0, "14M-1")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default="14M,109M")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--only", default="", help="contenders by prefix of their name")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--log", type=Path)


def main() -> None:
    given = parse(__doc__, arguments, smoke={"quick": True, "models": "14M", "batches": "1"})
    n_new, rounds = (sized(32, 4), 1) if given.quick else (128, given.rounds or 3)
    if not find_spec("transformers") or not (smoke() or find_spec("llama_cpp")):
        print("skipped: needs transformers and llama_cpp (pip install transformers llama-cpp-python)")
        sys.exit(77)
    only = tuple(part for part in given.only.split(",") if part)
    torch.set_num_threads(THREADS)
    table: dict[tuple[str, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as spare:
        for name in given.models.split(","):
            files = models.Files(given.folder or Path(spare), name)
            for batch in map(int, given.batches.split(",")):
                chosen = [
                    c
                    for c in contenders(files, batch, n_new, not given.quick)
                    if not only or f"{c.side} {c.kind}".startswith(only)
                ]
                found, same = measure(chosen, models.prompts(name, batch, PROMPT), n_new, rounds)
                cell = {who: batch * n_new / statistics.median(times) for who, times in found.items()}
                table[name, batch] = cell
                for who, speed in cell.items():
                    spread = [round(batch * n_new / t, 1) for t in found[who]]
                    line = f"{NAMES[name]:>8} {batch:3d} rows  {who:19} {speed:8.1f} tokens/s"
                    print(f"{line}  same ids {same[who]:.0%}  {spread}", flush=True)
                    if given.log:
                        with given.log.open("a") as file:
                            line = {
                                "model": name,
                                "batch": batch,
                                "who": who,
                                "tokens_per_second": speed,
                                "runs": spread,
                            }
                            file.write(json.dumps(line) + "\n")
                gc.collect()
    claims(table, n_new, given.quick)


if __name__ == "__main__":
    main()
