"""What a step's draws mean for a sequence: which tokens it takes, what may be shown of them, and whether it is over."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from whorl.engine.request import Finish, Token
from whorl.engine.sequence import Sequence


def take(
    sequence: Sequence, drawn: Many[Token | None], token_bytes: Many[bytes], longest: int, version: int
) -> tuple[list[Token], bytes, Finish | None]:
    """Takes in the tokens drawn for one sequence, one behind each draft, as far as the drafts were right.

    Args:
        drawn: None where nothing could be drawn; token_bytes: of each id, or empty where nobody wants text; longest:
            positions that a text may have; version: of the weights.

    Returns:
        The tokens that it took, the bytes that may be shown now, and why it ended, if it did.
    """
    r, text = sequence.request, b""
    finish: Finish | None = None
    taken: list[Token] = []
    drafts, sequence.drafts = sequence.drafts, []
    for k, one in enumerate(drawn):
        if one is None:  # its logits are no numbers, or everything was forbidden
            finish = "abort"
            text += sequence.stops.flush()
            break
        token = replace(one, version=version) if version else one
        taken.append(token)
        sequence.ids.append(token.id)
        if token.id in r.stop_ids:
            finish = "stop"
        else:
            if sequence.matcher is not None:
                sequence.matcher.advance(token.id)
                if sequence.matcher.mask() is None:
                    sequence.matcher = None
            if token_bytes:
                text += sequence.stops.add(token_bytes[token.id])
            if sequence.stops.met is not None:
                finish = "stop"
            elif sequence.matcher is not None and sequence.matcher.ended:
                finish = "stop" if sequence.matcher.failed is None else "abort"
            elif sequence.n_output >= r.max_tokens or len(sequence.ids) >= longest:
                finish = "length"
        if finish is not None:
            text += sequence.stops.flush()  # nothing, if a stop text was met
            break
        if k >= len(drafts) or drafts[k] != token.id:
            break
        sequence.computed += 1  # the draft's own position was computed with it, and is right
    return taken, text, finish


def score_prompt(sequence: Sequence, logits: Tensor, stop: int) -> None:
    """Log-probabilities of the prompt's ids behind the positions computed .. stop, of whose logits [n, vocab] these are."""
    targets = sequence.ids[sequence.computed + 1 : stop + 1]
    log_probs = logits[: len(targets)].log_softmax(-1)
    found = log_probs.gather(-1, torch.tensor(targets, device=logits.device)[:, None])
    # What was scored before it was preempted and read in anew is not told twice.
    del sequence.prompt_log_probs[sequence.computed :]
    sequence.prompt_log_probs += found[:, 0].tolist()
