"""What a step's draws mean for a sequence: which tokens it takes, what may be shown of them, and whether it is over."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from whorl.engine.request import FinishReason, Token
from whorl.engine.sequence import Sequence


def accept_tokens(
    sequence: Sequence,
    sampled: Many[Token | None],
    token_bytes: Many[bytes],
    max_positions: int,
    version: int,
) -> tuple[list[Token], bytes, FinishReason | None]:
    """Takes in the tokens drawn for one sequence, one behind each draft, as far as the drafts were right.

    Args:
        drawn: None where nothing could be drawn; token_bytes: of each id, or empty where nobody wants text; longest:
            positions that a text may have; version: of the weights.

    Returns:
        The tokens that it took, the bytes that may be shown now, and why it ended, if it did.
    """
    r, text = sequence.request, b""
    finish: FinishReason | None = None
    taken: list[Token] = []
    drafts, sequence.drafts = sequence.drafts, []
    for k, one in enumerate(sampled):
        if one is None:  # its logits are no numbers, or everything was forbidden
            finish = "abort"
            text += sequence.stop_checker.flush()
            break
        token = replace(one, version=version) if version else one
        taken.append(token)
        sequence.ids.append(token.id)
        if token.id in r.stop_ids:
            finish = "stop"
        else:
            if sequence.constraint is not None:
                sequence.constraint.advance(token.id)
                if sequence.constraint.mask() is None:
                    sequence.constraint = None
            if token_bytes:
                text += sequence.stop_checker.add(token_bytes[token.id])
            if sequence.stop_checker.matched is not None:
                finish = "stop"
            elif sequence.constraint is not None and sequence.constraint.ended:
                finish = "stop" if sequence.constraint.failed is None else "abort"
            elif sequence.n_output >= r.max_tokens or len(sequence.ids) >= max_positions:
                finish = "length"
        if finish is not None:
            text += sequence.stop_checker.flush()  # nothing, if a stop text was met
            break
        if k >= len(drafts) or drafts[k] != token.id:
            break
        sequence.n_computed += 1  # the draft's own position was computed with it, and is right
    return taken, text, finish


def score_prompt(sequence: Sequence, logits: Tensor, stop: int) -> None:
    """Log-probabilities of the prompt's ids behind the positions computed .. stop, of whose logits [n, vocab] these are."""
    targets = sequence.ids[sequence.n_computed + 1 : stop + 1]
    log_probs = logits[: len(targets)].log_softmax(-1)
    found = log_probs.gather(-1, torch.tensor(targets, device=logits.device)[:, None])
    # What was scored before it was preempted and read in anew is not told twice.
    del sequence.prompt_log_probs[sequence.n_computed :]
    sequence.prompt_log_probs += found[:, 0].tolist()
