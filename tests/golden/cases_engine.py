"""Golden cases of the engine: the token ids of 100 seeded requests for each model family and runner.

25 requests each sample plainly, under a grammar, with penalties, and with prompt-lookup speculation. Prompts share prefixes
and are longer than a page. Fewer rows run at once than there are requests, and the cache is small enough for preemptions.
The engine does not depend on a clock here: `max_decode_slowdown` is infinite.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from golden_case import Result, case, digest, fixed, text_hash
from golden_inputs import HEADS, SHAPES
from tests.support.train.model_shapes import disturbed

from whorl.engine.config import EngineConfig
from whorl.engine.cpu.runner import NativeRunner
from whorl.engine.engine import Engine
from whorl.engine.request import Grammar, Request
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.models import LanguageModel, Transformer, TransformerConfig, whorl_decoder

N = 25  # requests of each kind
NATIVE = ("decoder", "llama")  # families that the native runner supports
# Of 50 ids the last two have no text: 48 is never drawn, 49 ends an output.
WORDS = [bytes([n]) for n in b'abcdefghijklmnopqrstuvwxyz0123456789{}:," '] + [b"ab", b"12", b"xyz", b"cde"]
WORDS += [b"\n", b"-", b"", b""]
PATTERNS = ("[0-9]{3,9}", "[a-e]{2,12}", r'\{"a":(12|ab)+\}', "(ab|cd)*x")
LIMITS = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 80, "kv_cache_tokens": 128}
CONFIG = EngineConfig(**LIMITS, max_num_batched_tokens=24, max_decode_slowdown=math.inf)
# Sampling parameters, in turn. Speculation is cold enough that the text repeats itself.
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"temperature": 0}, {"temperature": 1, "top_p": 1}, {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1, "top_k": 7, "min_p": 0.05},
    ],
    "grammar": [{"temperature": 1, "top_p": 1}],
    "penalties": [
        {"temperature": 1, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {3: 4.0, 9: -50.0}},
        {"temperature": 0, "frequency_penalty": 1.5},
    ],
    "speculation": [{"temperature": t, "top_p": 1} for t in (0, 0, 0.5)],
}  # fmt: skip
KINDS = tuple(SAMPLING)


def model_of(family: str) -> LanguageModel:
    """The tiny model of a family, float32, vocabulary of 50 ids."""
    small = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "mlp_hidden": 40}
    draw, changes = torch.Generator().manual_seed(0), SHAPES[family]
    if changes is None:
        decoder = Transformer(whorl_decoder(**{**small, **HEADS, "ngram_buckets": 64}), draw)
        return disturbed(decoder, 0.15).eval()
    config = TransformerConfig.model_validate({**small, "max_length": 80, **changes})
    return disturbed(Transformer(config, draw, torch.float32), 0.15).eval()


def requests(kind: str) -> list[Request]:
    """The 25 requests of a kind."""
    draw = torch.Generator().manual_seed(KINDS.index(kind))
    prefix = tuple(torch.randint(0, 48, (9,), generator=draw).tolist())
    made = []
    for n in range(N):
        own = tuple(torch.randint(0, 48, (1 + n % 7,), generator=draw).tolist())
        ids, more = prefix + own if n % 3 else own, dict[str, Any]()
        if kind == "grammar":
            more["grammar"] = Grammar(regex=PATTERNS[n % len(PATTERNS)])
        if kind == "plain" and n % 5 == 0:
            more["forced_prefix"] = b"ab"
        if kind == "speculation":
            ids = ids + ids
        settings = SAMPLING[kind][n % len(SAMPLING[kind])]
        sampling = SamplingParams(**settings, seed=100 * KINDS.index(kind) + n)
        limits = {"max_tokens": 32 if kind == "speculation" else 16, "stop_ids": frozenset({49})}
        made.append(Request(id=str(n), ids=ids, sampling=sampling, **limits, **more))
    return made


def _family(family: str, native: bool) -> Result:
    with fixed(WHORL_CHOOSE="cpu=native" if native else "cpu=torch"):
        model, result, numbers = model_of(family), Result(), list[str]()
        for kind in KINDS:
            engine = Engine(
                model, CONFIG, token_bytes=WORDS, banned_ids=(48,),
                compile_grammar=GrammarCompiler(WORDS, [49]).compile,
                proposer=PromptLookup() if kind == "speculation" else None,
            )  # fmt: skip
            assert isinstance(engine.runner, NativeRunner) == native
            asked = requests(kind)
            found: dict[str, list[int]] = {request.id: [] for request in asked}
            for request in asked:
                engine.add(request)
            while engine.busy:
                for delta in engine.step():
                    found[delta.request_id] += [token.id for token in delta.tokens]
                    numbers += [f"{token.log_prob!r} {token.raw_log_prob!r}" for token in delta.tokens]
            assert kind != "speculation" or engine.stats.accepted_tokens > 0
            result.ids[kind] = [digest(found[request.id]) for request in asked]
        result.bits["log_probs"] = text_hash("\n".join(numbers))
        return result


for _name in SHAPES:
    case(f"engine/{_name}/torch")(partial(_family, _name, native=False))
for _name in NATIVE:
    case(f"engine/{_name}/native")(partial(_family, _name, native=True))
