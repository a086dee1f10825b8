"""Texts of a model for the report: samples with their probabilities, and the best completed function."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from whorl.evals.prompts import CHECKED_TEXTS, PYTHON_PROMPTS, has_words, is_python
from whorl.recipes.registry import StepContext

if TYPE_CHECKING:
    from whorl.evals.kinds.kind import EvalTask
    from whorl.evals.results import TaskResult
    from whorl.tokens.tokenizer import Tokenizer

__all__ = ["CHECKED_TEXTS", "draw_samples", "nearest_to_real_code"]

TOP_LOGPROBS = 5  # alternatives per token of a sample
OPENING_BYTES = 300


def nearest_to_real_code(task: EvalTask, result: TaskResult) -> str | None:
    """Return the completed function whose body is most similar to the real one; None if no completion parses.

    task: `own-functions`, whose records have the header and the real body.
    """
    best, text = -1.0, None
    for item, found in zip(task.items, result.items, strict=True):
        if found.outcome == "right":
            body, real = found.details["extracted"][0], item.fields["body"]
            similarity = SequenceMatcher(None, body.strip(), real.strip(), autojunk=False).ratio()
            if similarity > best:
                best, text = similarity, textwrap.dedent(item.fields["header"] + body).rstrip()
    return text


def draw_samples(
    ctx: StepContext, tokenizer: Tokenizer, held_out: Sequence[str], *, n: int, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Return samples with the probability of every token: fixed prompts for Python, then the start of held-out files."""
    from whorl.engine import SamplingParams, load_for_sampling
    from whorl.evals.model.sampling import open_engine
    from whorl.tracking.seeds import derive

    model = load_for_sampling(ctx.parent_folder("model"), ctx.machine)
    fixed = PYTHON_PROMPTS if is_python(held_out) else ()
    openings = [text.encode()[:OPENING_BYTES].decode("utf-8", "ignore") for text in held_out]
    openings.sort(key=lambda opening: not has_words(opening.partition("\n")[0]))  # the first ones are shown
    texts = [text.encode() for text in (*fixed, *openings)][:n]
    sampling = SamplingParams()
    prompts = [tokenizer.heal_prompt(text.decode("utf-8", "ignore")) for text in texts]
    if not prompts:
        return []
    room = max(len(healed.ids) for healed in prompts)
    room = max(1, min(room, model.declared_length - max_tokens))
    engine = open_engine(model, (len(prompts), room + max_tokens), tokenizer)
    completions = engine.generate(
        [healed.ids[-room:] for healed in prompts],
        [sampling.model_copy(update={"seed": derive(seed, "report", i)}) for i in range(len(prompts))],
        max_tokens=max_tokens,
        stop_ids=tokenizer.end_ids,
        forced_prefixes=[healed.forced_prefix for healed in prompts],
        top_log_probs=TOP_LOGPROBS,
    )
    out = []
    for text, healed, completion in zip(texts, prompts, completions, strict=True):
        kept = text[: len(text) - len(healed.forced_prefix)]
        tokens = []
        for token in completion.tokens[: -1 if completion.finish_reason == "stop" else None]:
            tokens.append(
                {
                    "hex": tokenizer.decode([token.id]).hex(),
                    "probability": math.exp(token.raw_log_prob),
                    "alternatives": [
                        [tokenizer.decode([i]).hex(), math.exp(p)] for i, p in token.alternatives
                    ],
                }
            )
        out.append(
            {
                "prompt": kept.decode("utf-8", "replace"),
                "tokens": tokens,
                "note": f"temperature {sampling.temperature}, top-p {sampling.top_p}, seed {seed}",
            }
        )
    return out
