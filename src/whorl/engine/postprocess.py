"""Apply the results of a step to its sequences: accepted tokens, visible text, finish reason, scores of prompts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from whorl.engine.model.token_scores import TokenScores
from whorl.engine.request import FinishReason, Token
from whorl.engine.scheduler import Schedule
from whorl.engine.sequence import Sequence


def accept_tokens(
    sequence: Sequence,
    sampled: SequenceABC[Token | None],
    token_bytes: SequenceABC[bytes],
    max_positions: int,
    version: int,
) -> tuple[list[Token], bytes, FinishReason | None]:
    """Append the tokens sampled for one sequence, one after each draft, as far as the drafts are correct.

    Args:
        sampled: one token per position; None where nothing could be sampled.
        token_bytes: the bytes of each id, or empty if no text is needed.
        max_positions: maximum length of a sequence.
        version: version of the weights.

    Returns:
        The accepted tokens, the bytes that may be shown now, and the finish reason or None.
    """
    request, text = sequence.request, b""
    finish: FinishReason | None = None
    accepted: list[Token] = []
    drafts, sequence.drafts = sequence.drafts, []
    for k, candidate in enumerate(sampled):
        if candidate is None:  # the logits were not finite, or every id was banned
            finish = "abort"
            text += sequence.stop_checker.flush()
            break
        token = candidate  # without `replace`, which takes a tenth of the engine's Python
        if version:
            token = Token(
                candidate.id, candidate.log_prob, candidate.raw_log_prob, candidate.alternatives, version
            )
        accepted.append(token)
        sequence.ids.append(token.id)
        if token.id in request.stop_ids:
            finish = "stop"
        else:
            if sequence.constraint is not None:
                sequence.constraint.advance(token.id)
                if sequence.constraint.mask() is None:
                    sequence.constraint = None
            if token_bytes:
                shown = sequence.skip_forced(token_bytes[token.id])
                early = request.min_tokens and sequence.n_output - sequence.n_forced <= request.min_tokens
                text += shown if early else sequence.stop_checker.add(shown)
            if sequence.stop_checker.matched is not None:
                finish = "stop"
            elif sequence.constraint is not None and sequence.constraint.ended:
                finish = "stop" if sequence.constraint.failed is None else "abort"
            elif sequence.n_remaining <= 0 or len(sequence.ids) >= max_positions:
                finish = "length"
        if finish is not None:
            text += sequence.stop_checker.flush()  # empty if a stop string matched
            break
        if k >= len(drafts) or drafts[k] != token.id:
            break
        if sequence.block == 1:
            sequence.n_computed += (
                1  # the draft's position was computed in this step, and the draft is correct
            )
    return accepted, text, finish


def store_scores(schedule: Schedule, scores: TokenScores | None) -> None:
    """Give each sequence of a step the scores of its ids. Call it before the positions count as computed."""
    if scores is None:
        return
    scores = scores.cpu()
    log_probs, greedy = scores.log_probs.tolist(), scores.greedy.tolist()
    top_ids, top = scores.top_ids.tolist(), scores.top_log_probs.tolist()
    at = 0
    for sequence, n in schedule.rows:
        positions = sequence.positions_to_score(sequence.n_computed + n)
        if not positions or sequence.scores is None:
            continue
        stop = at + len(positions)
        k = sequence.request.top_log_probs
        alternatives = [
            tuple(zip(ids[:k], values[:k], strict=True))
            for ids, values in zip(top_ids[at:stop], top[at:stop], strict=True)
        ]
        sequence.scores.put(positions.start, log_probs[at:stop], greedy[at:stop], alternatives if k else [])
        at = stop
