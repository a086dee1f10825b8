"""The picture of a search tree."""

from __future__ import annotations

import torch

from whorl.agents.search.game import CONNECT4
from whorl.agents.search.tree import search
from whorl.report.agents import search_block


def test_search_block_lists_moves_and_their_replies() -> None:
    state = CONNECT4.position([3, 0, 3, 0])
    center = torch.tensor([0.0, 0, 0, 3, 0, 0, 0])
    tree = search(
        CONNECT4, state, lambda s: (center.expand(len(s), 7), torch.zeros(len(s))), simulations=60
    ).tree
    block = search_block("agent", tree)
    moves = [bar for bar in block.bars if not bar.cells[0].startswith("\u2003")]
    assert [bar.value for bar in moves] == sorted(
        (v for v in tree.statistics[0, :, 1].tolist() if v >= 2), reverse=True
    )
    assert moves[0].cells[0] == "4" and moves[0].cells[3] == f"{float(center.softmax(0)[3]):.0%}"
    assert block.bars[1].cells[0] == "\u20034" and block.bars[1].style == "main"  # the reply is to block
    line = [bar.cells[0].strip() for bar in block.bars if bar.style == "main"]
    shown = ", ".join(line)
    assert f"Principal variation: {shown}" in block.note
    assert line == [str(1 + action) for action in tree.variation(1)][: len(line)]
