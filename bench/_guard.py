"""The last quick results of each kind of machine, and what fell since then.

`bench/results/quick/KIND.jsonl` has one line for each figure, with the machine's rates measured right before and after its
bench: GEMM in fp32 and bf16, and a copy. A figure with a speed (tokens/s, ms) is divided by the change of that rate that
slowed most, so that a slower machine is no fall. The ratio to the peer needs no such correction: both ran in one run.

The direction of a ratio follows from its bar: where a higher ratio is good, it is above the bar when the figure is ok.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench._run import RESULTS

TOLERANCE = 0.05
TIME_UNITS = ("s", "ms", "us", "ns", "seconds")

Record = dict[str, Any]


def quick_file(kind: str) -> Path:
    """The file of a kind of machine."""
    return RESULTS / "quick" / f"{kind}.jsonl"


def read_quick(path: Path) -> dict[str, Record]:
    """Return the last quick record of each figure."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["id"]: row for row in rows}


def write_quick(path: Path, records: Mapping[str, Record]) -> None:
    """Write the records, sorted by id, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        "".join(json.dumps(records[name]) + "\n" for name in sorted(records)), encoding="utf-8"
    )
    temporary.replace(path)


def kind_of_machine() -> str:
    """The kind of this machine, by its GPU if it has one."""
    import torch

    from whorl.machine.identity import machine_kind

    return machine_kind(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")


def current_rates() -> dict[str, float]:
    """Measure GEMM in FLOP/s by type and a copy in bytes/s, with all usable cores or on the GPU."""
    import torch

    from whorl.machine.device_probe import measure_peaks, usable_cores

    torch.set_num_threads(usable_cores())
    flops, bandwidth = measure_peaks("cuda" if torch.cuda.is_available() else "cpu")
    return {**flops, "copy": bandwidth}


def mean_rates(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of two measurements."""
    return {name: (rate + after[name]) / 2 for name, rate in before.items()}


def falls(last: Mapping[str, Record], now: Iterable[Record]) -> list[str]:
    """Return a line for each figure that is more than TOLERANCE worse than the last one of an equally long run."""
    found = []
    for record in now:
        before = last.get(record["id"])
        if before is None or any(before.get(part) != record.get(part) for part in ("unit", "quick")):
            continue
        speed = _relative_speed(before, record)
        if speed is not None and speed < 1 - TOLERANCE:
            found.append(
                f"{record['id']}: {record['ours']:g} after {before['ours']:g} {record['unit']}, "
                f"{speed - 1:+.0%} normalized by the machine's rates ({before['date']})"
            )
        quality = _relative_ratio(before, record)
        if quality is not None and quality < 1 - TOLERANCE:
            found.append(
                f"{record['id']}: ratio {record['ratio']:g} after {before['ratio']:g}, {quality - 1:+.0%} "
                f"({before['date']}; {record.get('peer_name') or 'peer'})"
            )
    return found


def _relative_speed(before: Record, now: Record) -> float | None:
    """Return the speed now over the earlier one, corrected by the rate that slowed most; None for other units."""
    unit = now["unit"]
    if not (unit.endswith("/s") or unit in TIME_UNITS) or min(before["ours"], now["ours"]) <= 0:
        return None
    speed = now["ours"] / before["ours"] if unit.endswith("/s") else before["ours"] / now["ours"]
    changes = [now["rates"][name] / rate for name, rate in before["rates"].items() if now["rates"].get(name)]
    return float(speed / min([1.0, *changes]))


def _relative_ratio(before: Record, now: Record) -> float | None:
    """Return the ratio now over the earlier one, above 1 if it is better; None if the direction is unknown."""
    if min(before["ratio"], now["ratio"]) <= 0 or before["ratio"] == before["bar"]:
        return None
    higher_is_better = (before["ratio"] > before["bar"]) == before["ok"]
    change = now["ratio"] / before["ratio"]
    return float(change if higher_is_better else 1 / change)
