"""Small models of every family, and the comparison of an engine's log-probabilities with the training forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.support.models.transformer_shapes import HEADS, KINDS, made
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.models import LanguageModel, Transformer, whorl_decoder
from whorl.models.transformer_config import CustomMixer
from whorl.registry import permit_code

GREEDY = SamplingParams(temperature=0)
G = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(0, 50, (n,), generator=G).tolist() for n in (1, 2, 5, 9, 17, 33)]


def decoder(**changes: Any) -> Transformer:
    shape = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    config = whorl_decoder(**{**shape, "mlp_hidden": 40, "ngram_buckets": 64, **changes})
    model = Transformer(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.15)
    return model.eval()


def additive(window: int | None = None) -> CustomMixer:
    """A mixer from outside the package, with a cache of its own that grows per token."""
    address = "tests.support.engine.additive_attention:AdditiveAttention"
    permit_code(address)
    return CustomMixer(kind=address, options={"window": window})


OWN_CACHE = {
    "own cache": {"mixers": {"own": additive()}},
    "own cache, windows": {"mixers": {"near": additive(5), "far": additive(), "heads": HEADS}},
}
FAMILIES = {
    **{kind: lambda shape=shape: made(**shape).eval() for kind, shape in {**KINDS, **OWN_CACHE}.items()},
    "decoder": decoder,
    "decoder without memory": lambda: decoder(ngram_orders=(), smear_keys=False, tie_embeddings=True),
}


def config(**changes: Any) -> EngineConfig:
    """Small pages and steps, so that a prompt takes several of each."""
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
    return EngineConfig(**{**sizes, **changes})


def request(name: str = "one", ids: Iterable[int] = (1, 2, 3, 4, 5), **fields: Any) -> Request:
    """A greedy request for 6 tokens."""
    return Request(**{"id": name, "ids": tuple(ids), "sampling": GREEDY, "max_tokens": 6, **fields})


def prompt_requests(max_tokens: int, **sampling: Any) -> list[Request]:
    """One request for each of `PROMPTS`; number n samples with seed n."""
    numbered = [(ids, SamplingParams(seed=n, **sampling)) for n, ids in enumerate(PROMPTS)]
    return [request(str(s.seed), ids, sampling=s, max_tokens=max_tokens) for ids, s in numbered]


def drain(engine: Any, requests: Iterable[Request] = ()) -> dict[str, list[Delta]]:
    """Add `requests` and run `engine` until it is idle. Returns the deltas of each request, in the order in which
    they begin. Checks the page accounting at every step."""
    out: dict[str, list[Delta]] = {}
    for one in requests:
        engine.add(one)
    while engine.busy:
        for delta in engine.step():
            out.setdefault(delta.request_id, []).append(delta)
        if isinstance(engine, Engine):
            engine.check_integrity()
    return out


def tokens_of(deltas: list[Delta]) -> list[Token]:
    """The tokens of all deltas, in order."""
    return [token for delta in deltas for token in delta.tokens]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Token]]:
    """Add the requests, run the engine until it is idle, and return the tokens of each request."""
    out = drain(engine, requests)
    return {one.id: tokens_of(out.get(one.id, [])) for one in requests}


def run_one(engine: Engine, one: Request) -> list[Token]:
    """The tokens of a single request."""
    return run(engine, [one])[one.id]


def ids_of(out: dict[str, list[Token]]) -> dict[str, list[int]]:
    """Token ids of each request."""
    return {name: [token.id for token in tokens] for name, tokens in out.items()}


def assert_same(got: list[Token], want: list[Token]) -> None:
    """Equal ids, and log-probabilities equal up to rounding, which depends on the batch."""
    assert [t.id for t in got] == [t.id for t in want]
    for name in ("log_prob", "raw_log_prob"):
        a, b = (torch.tensor([getattr(t, name) for t in tokens]) for tokens in (got, want))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@torch.no_grad()
def expected(model: LanguageModel, ids: list[int], n_prompt: int) -> torch.Tensor:
    """Log-probabilities of the ids after the prompt, by the training forward."""
    log_probs = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    targets = torch.tensor(ids[n_prompt:])
    return log_probs[n_prompt - 1 : -1].gather(-1, targets[:, None])[:, 0]


def check(model: LanguageModel, requests: list[Request], out: dict[str, list[Token]]) -> None:
    for one in requests:
        tokens = out[one.id]
        assert len(tokens) == one.max_tokens
        want = expected(model, [*one.ids, *(t.id for t in tokens)], len(one.ids))
        got = torch.tensor([t.raw_log_prob for t in tokens])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
