"""The last line of every benchmark: one JSON object that says what was claimed, on what, and whether it held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


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
) -> None:
    """Prints the line.

    Args:
        ours, peer: the two figures, in `unit`, measured side by side in this run.
        ratio: what is held against `bar`, which is what was asked for.
        samples: the single measurements.
        quick: a shortened run.
    """
    from whorl.machine.device_probe import probe

    machine = probe()
    print(
        json.dumps(
            {
                "claim": what,
                "ours": ours,
                "peer": peer,
                "unit": unit,
                "ratio": round(ratio, 4),
                "bar": bar,
                "ok": bool(ok),
                "quick": quick,
                "machine": {
                    "cpu": machine.cpu,
                    "cores": machine.cores,
                    "products": {k: f"{v / 1e12:.2f} TFLOP/s" for k, v in machine.flops.items()},
                    "threads": machine.threads,
                },
                "samples": list(samples),
            }
        )
    )
