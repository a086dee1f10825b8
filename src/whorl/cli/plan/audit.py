"""`whorl plan audit`: what plans have predicted, and what their runs measured."""

from __future__ import annotations

from typing import Annotated

import typer

from whorl.cli.options import StoreOption


def audit(
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and summary as JSON.")] = False,
    store: StoreOption = None,
) -> None:
    """Compare the predictions of all plans in a store with what was measured: loss, seconds, memory, bytes sent.

    Example:

        whorl plan audit --json
    """
    import json
    import math
    from dataclasses import asdict

    from whorl.cli.text_table import print_table
    from whorl.plan.dial import audit as audits
    from whorl.report.format import format_quantity
    from whorl.store import Store

    rows = audits.audit(Store(store))
    summary = audits.summarize(rows)
    if as_json:
        print(json.dumps({"rows": [asdict(row) | {"ratio": row.ratio} for row in rows], "summary": summary}))
        return
    if not rows:
        print("no run of this store was planned and measured; make one: whorl run quickstart")
        return
    cells = [
        [f"{r.run} {r.address[:8]}", r.quantity, format_quantity(r.predicted, audits.UNITS[r.quantity]),
         format_quantity(r.measured, audits.UNITS[r.quantity]), f"{r.ratio:.3f}", r.note]
        for r in rows
    ]  # fmt: skip
    print_table(
        ["run", "quantity", "predicted", "measured", "ratio", "note"], cells, left=("quantity", "note")
    )
    for name, s in summary.items():
        print(
            f"{name}: measured / predicted {s['median_ratio']:.3f} (median of {s['runs']}), {s['near']} within "
            f"{audits.NEAR:.0%}, at most {math.exp(s['largest_error']):.2f} times off"
        )
