"""Claims of shares and of largest differences, printed as a row and kept as JSON lines."""

from __future__ import annotations

from _run import claim


def claim_share(
    what: str,
    variant: str,
    ours: float,
    peer: float,
    low: float,
    high: float,
    peer_name: str,
    quick: bool = False,
) -> None:
    middle = (low + high) / 2
    print(f"{what:<90} {ours:7.2%}  {peer_name} {peer:.2%}")
    claim(
        what, ours=ours, peer=peer, unit="share", ratio=abs(ours - middle), bar=round(high - middle, 4),
        ok=low <= ours <= high, peer_name=peer_name, variant=variant, quick=quick,
    )  # fmt: skip


def claim_gap(what: str, variant: str, gap: float, bar: float, peer_name: str, quick: bool = False) -> None:
    print(f"{what:<90} {gap:.1e}")
    claim(
        what, ours=gap, peer=0.0, unit="largest difference", ratio=gap, bar=bar, ok=gap <= bar, peer_name=peer_name,
        variant=variant, quick=quick,
    )  # fmt: skip
