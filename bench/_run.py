"""The command line of every bench, and its last line: one JSON object.

    args = parse(__doc__, lambda parser: parser.add_argument("--rounds", type=int, default=3), smoke={"rounds": 1})
    ...
    claim("...", ours=..., peer=..., unit="tokens/s", ratio=..., bar=..., ok=..., samples=[...])

`--smoke` runs a script in seconds at sizes whose figures mean nothing. `--save` puts the line into `bench/results/`,
from which `bench/report.py` writes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from whorl.store import Store

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SMOKE, STORE, DATA = "WHORL_BENCH_SMOKE", "WHORL_BENCH_STORE", "WHORL_DATA"  # environment variables
SKIPPED = 77  # exit code
PRETRAINED = "quickstart/pretrain"


def parse(
    doc: str | None,
    add: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
    *,
    smoke: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """The script's arguments.

    Args:
        doc: the script's docstring, for `--help`.
        add: adds the script's own arguments.
        smoke: values of arguments (or further constants) that `--smoke` sets.
        quick: those that `--quick` sets, which is an option if there are any; `--smoke` sets them too, and its own last.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: checks that the script runs")
    parser.add_argument("--save", action="store_true", help="keep the JSON line in bench/results/")
    add(parser)
    if quick:
        parser.add_argument("--quick", action="store_true", help="a shortened run")
    args = parser.parse_args()
    changes: dict[str, Any] = {}
    if quick and (args.quick or args.smoke):
        changes |= {**quick, "quick": True}
    if args.smoke:
        os.environ[SMOKE] = "1"
        changes |= smoke or {}
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def parse_quick(doc: str | None) -> bool:
    """Whether `--quick` or `--smoke` is given to a script without further arguments."""
    options = parse(doc, lambda p: p.add_argument("--quick", action="store_true"), smoke={"quick": True})
    return bool(options.quick)


def smoke() -> bool:
    """Whether `--smoke` was given to this process or to the one that started it."""
    return os.environ.get(SMOKE) == "1" or "--smoke" in sys.argv


def emulates_bf16() -> bool:
    """Whether this CPU has no fast bf16 products, so that a peer's settings in bf16 need minutes and cannot be its best."""
    from whorl.machine.device_probe import probe

    flops = probe().flops
    found = flops["bfloat16"] < 0.1 * flops["float32"]
    if found:
        print(
            "bf16 products run at less than a tenth of fp32's rate here: peers are timed in fp32 alone",
            flush=True,
        )
    return found


def skip(reason: str) -> NoReturn:
    """Exit as skipped: one line with what is missing and how to get it."""
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def data_path(name: str, source: str) -> Path:
    """A file or folder of public data; exits as skipped where it is absent.

    Args:
        name: in the folder $WHORL_DATA; default ../shared/data of the checkout.
        source: where it can be downloaded.
    """
    path = Path(os.environ.get(DATA) or ROOT.parent / "shared" / "data") / name
    if not path.exists():
        skip(f"no {path}: get {name} from {source}; {DATA} names its folder")
    return path


def quickstart_store(path: str | Path | None, *names: str) -> Store:
    """The store at `path`, else of $WHORL_BENCH_STORE (see run_all.py), else the default; exits as skipped without `names`.

    Args:
        names: artifacts that the script needs; default quickstart/pretrain.
    """
    from whorl.errors import StoreError
    from whorl.store import Store

    store = Store(path or os.environ.get(STORE))
    for name in names or (PRETRAINED,):
        try:
            store.open(name)
        except StoreError:
            skip(
                f"no {name} in the store {store.location}: make it by `whorl run quickstart`, or give --store"
            )
    return store


def sized(full: Any, small: Any) -> Any:
    """`full`, or `small` under `--smoke`."""
    return small if smoke() else full


def claim(
    what: str,
    *,
    ours: float,
    peer: float,
    unit: str,
    ratio: float,
    bar: float,
    ok: bool,
    samples: Sequence[Any] = (),
    quick: bool = False,
    peer_name: str = "",
    variant: str = "",
) -> None:
    """Print the JSON line, and save it with `--save`.

    Args:
        ours, peer: the two figures, in `unit`, measured in this run.
        ratio: the figure that is compared with `bar`, the target.
        samples: single measurements.
        quick: a shortened run.
        variant: distinguishes several claims of one script.
    """
    from whorl.machine.device_probe import probe
    from whorl.machine.identity import machine_kind

    machine = probe()
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    record = {
        "id": name.removeprefix("bench/").removesuffix(".py") + (f":{variant}" if variant else ""),
        "script": name,
        "claim": what,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": round(ratio, 4),
        "bar": bar,
        "ok": bool(ok),
        "quick": quick,
        "smoke": smoke(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": machine.cpu,
            "kind": machine_kind(machine.gpu if machine.device == "cuda" else ""),
            "gpu": machine.gpu if machine.device == "cuda" else "",
            "cores": machine.cores,
            "gemm": {k: f"{v / 1e12:.2f} TFLOP/s" for k, v in machine.flops.items()},
            "threads": machine.threads,
        },
        "samples": list(samples),
    }
    if "--save" in sys.argv and not smoke():
        _save(record)
    print(json.dumps(record))


def column_of(machine: Any) -> str:
    """The kind of a record's machine in docs/benchmarks.md: AMX, Zen 5, Zen 4, Zen 3, GPU, or the CPU's name."""
    if not isinstance(machine, dict):
        return "Zen 5"  # transcribed: 2 cores of 0.45 TFLOP/s in bf16 each
    kind, cpu = machine.get("kind", ""), machine.get("cpu", "")
    if machine.get("gpu"):
        return "GPU"
    # Records without a kind: the only Intel CPU before was one with AMX.
    if kind.endswith("-amx") or (not kind and cpu.startswith("Intel")):
        return "AMX"
    family, model = re.search(r"family (\d+) model (\d+)", cpu).groups() if "family" in cpu else ("", "")
    if cpu.startswith("AMD") and family == "26":
        return "Zen 5"
    if cpu.startswith("AMD") and family == "25":
        return "Zen 4" if int(model) >= 16 else "Zen 3"
    return kind or cpu


def _save(record: dict[str, Any]) -> None:
    """Replace the record of the same id and kind of machine in the room's file."""
    path = RESULTS / f"{record['id'].split('/')[0]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = (record["id"], column_of(record["machine"]))
    kept = [old for old in kept if (old["id"], column_of(old["machine"])) != new]
    rows = sorted([*kept, record], key=lambda row: (row["id"], column_of(row["machine"])))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
