"""The first losses of a few tiny models, checked in: what a change of the code does to learning shows as a changed number.

Bits differ between processors (other instructions, other orders of summing), so the curves are compared within a tolerance:
wide enough for another processor's rounding, which 20 steps amplify, and narrow enough for a changed constant.
`test_golden.py` holds both ends: it trains with another library and in micro-batches, and with constants slightly changed.
Measured: rounding (other instruction sets, another library) moves a curve by 2e-7 at most, noise of 1e-6 on every weight by
6e-7, a learning rate that is 1 % higher by 2e-4 at least.

To change the curves on purpose, run this file and say in the commit why they changed:

    python tests/train/golden.py --write
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiny import Notes, job, make_tokens

from whorl.models import TransformerConfig
from whorl.train.job import Job
from whorl.train.pretrain import pretrain

CURVES = Path(__file__).parent / "golden_curves.json"
STEPS = 20
TOLERANCE = 1e-4  # relative

HEADS = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
SHAPES: dict[str, dict[str, Any] | None] = {
    "decoder": None,  # the house's own
    "llama": {"mixers": {"m": HEADS}},
    "mamba": {"mixers": {"m": {"kind": "mamba"}}},
    "experts": {
        "mixers": {"m": HEADS},
        "experts": {"n_experts": 4, "top_k": 2, "hidden": 32, "bias_balance": True, "scoring": "sigmoid"},
    },
}


def golden_job(name: str, tokens: Path, **change: object) -> Job:
    """The job of a curve. float32, one replica, one thread, nothing compiled, nothing timed."""
    more: dict[str, object] = {"steps": STEPS, "deterministic": True, "evaluations": 1}
    if (shape := SHAPES[name]) is not None:
        base = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "mlp_hidden": 64}
        more["model"] = TransformerConfig.model_validate({**base, **shape})
    return job(tokens, **{**more, **change})


def losses(wanted: Job) -> list[float]:
    """Mean loss of each step, nats a token."""
    notes = Notes()
    with tempfile.TemporaryDirectory() as scratch:
        pretrain(wanted, Path(scratch), notes)
    return [step["nll"] for step in notes.steps]


def main() -> None:
    before = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = make_tokens(Path(folder))
        curves = {name: [round(x, 7) for x in losses(golden_job(name, tokens))] for name in SHAPES}
    for name, curve in curves.items():
        old = before.get(name, curve)
        print(f"{name}: moved by {max(abs(a / b - 1) for a, b in zip(curve, old, strict=True)):.1e} at most")
    if "--write" in sys.argv:
        lines = ",\n".join(f' "{name}": {json.dumps(curve)}' for name, curve in curves.items())
        CURVES.write_text(f"{{\n{lines}\n}}\n")
        print(f"written to {CURVES}")


if __name__ == "__main__":
    main()
