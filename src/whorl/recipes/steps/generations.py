"""Texts that a model generates for the report: completions of held-out functions, and samples with their probabilities."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from whorl.errors import DataError
from whorl.evals.prompts import CHECKED_TEXTS, PYTHON_PROMPTS, is_python
from whorl.recipes.registry import StepContext

if TYPE_CHECKING:
    from whorl.corpus import Document
    from whorl.evals.parse_rate import FunctionPrompt
    from whorl.models import LanguageModel
    from whorl.tokens.tokenizer import Tokenizer

__all__ = ["CHECKED_TEXTS", "complete_functions", "draw_samples"]

COMPLETION_WINDOW = 512  # tokens of a prompt and its completion
COMPLETION_ROWS = 64  # completed at once
TOP_LOGPROBS = 5  # alternatives per token of a sample
OPENING_BYTES = 300


def complete_functions(
    ctx: StepContext, model: LanguageModel, tokenizer: Tokenizer, held_out: Sequence[Document], *,
    n: int, max_tokens: int, window: int | None, seed: int,
) -> dict[str, Any] | None:  # fmt: skip
    """Return the parse rate of completed held-out functions, the speed, and the completed function nearest to the real one.

    None for texts without Python functions.
    """
    from whorl.engine import EngineConfig, SamplingParams
    from whorl.engine.engine import Engine
    from whorl.evals.parse_rate import (
        END_OF_DOCUMENT,
        parse_rate,
        reference_parse_rate,
        sample_function_prompts,
    )
    from whorl.tokens.healing import heal
    from whorl.tracking.seeds import derive

    try:
        chosen = sample_function_prompts(((d.id, d.text.encode()) for d in held_out), n, seed)
    except DataError:
        return None  # no Python in this corpus
    context = max(1, min(window or COMPLETION_WINDOW, COMPLETION_WINDOW) - max_tokens)
    speed = {"tokens": 0, "seconds": 0.0}

    def generate(texts: list[bytes]) -> list[bytes]:
        healed, rows = [heal(tokenizer, t.decode()) for t in texts], model.config.vocab_size
        engine = Engine(
            model,
            EngineConfig.for_batch(min(len(texts), COMPLETION_ROWS), context + max_tokens),
            token_bytes=tokenizer.text_bytes(rows),
            banned_ids=tokenizer.banned_ids(rows),
        )
        began = time.perf_counter()
        ends = engine.generate(
            [h.ids[-context:] for h in healed],
            SamplingParams(seed=derive(seed, "completions")),
            max_tokens=max_tokens,
            stop_ids=tokenizer.end_ids,
            forced_prefixes=[h.forced_prefix for h in healed],
        )
        speed["seconds"] += time.perf_counter() - began
        speed["tokens"] += sum(len(end.tokens) for end in ends)
        return [end.text + (END_OF_DOCUMENT if end.finish_reason == "stop" else b"") for end in ends]

    with ctx.progress.task("Completing held-out functions", total=None):
        found = parse_rate(chosen, generate)
    reference = reference_parse_rate(chosen)
    return {
        "prompts": found.n,
        "parsed": found.parsed,
        "unfinished": found.unfinished,
        "median_bytes": found.median_bytes,
        "real_parsed": reference.parsed,
        "tokens_per_second": speed["tokens"] / max(1e-9, speed["seconds"]),
        "nearest": _nearest_to_real_code(found.examples),
    }


def _nearest_to_real_code(examples: Iterable[tuple[FunctionPrompt, bytes | None]]) -> str | None:
    """Return the completed function whose body is most similar to the real one; None if no completion parses."""
    best, text = -1.0, None
    for prompt, body in examples:
        if body is not None:
            similarity = SequenceMatcher(None, body.strip(), prompt.body.strip(), autojunk=False).ratio()
            if similarity > best:
                best, text = similarity, textwrap.dedent((prompt.header + body).decode()).rstrip()
    return text


def draw_samples(
    ctx: StepContext, tokenizer: Tokenizer, held_out: Sequence[str], *, n: int, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Return samples with the probability of every token: fixed prompts for Python, then the start of held-out files."""
    from whorl.engine import EngineConfig, SamplingParams, load_for_sampling
    from whorl.engine.engine import Engine
    from whorl.tokens.healing import heal
    from whorl.tracking.seeds import derive

    model = load_for_sampling(ctx.parent_folder("model"), ctx.machine)
    fixed = PYTHON_PROMPTS if is_python(held_out) else ()
    texts = [text.encode()[:OPENING_BYTES] for text in (*fixed, *held_out)][:n]
    sampling, rows = SamplingParams(), model.config.vocab_size
    prompts = [heal(tokenizer, text.decode("utf-8", "ignore")) for text in texts]
    if not prompts:
        return []
    room = max(len(healed.ids) for healed in prompts)
    if model.max_positions is not None:
        room = max(1, min(room, model.max_positions - max_tokens))
    engine = Engine(
        model,
        EngineConfig.for_batch(len(prompts), room + max_tokens),
        token_bytes=tokenizer.text_bytes(rows),
        banned_ids=tokenizer.banned_ids(rows),
    )
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
