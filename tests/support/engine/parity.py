"""Small models of every family, and the comparison of an engine's log-probabilities with the training forward."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models.transformer_shapes import KINDS, made
from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.models import Decoder, DecoderConfig, LanguageModel

GREEDY = SamplingParams(temperature=0)
G = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(0, 50, (n,), generator=G).tolist() for n in (1, 2, 5, 9, 17, 33)]


def decoder(**changes: Any) -> Decoder:
    shape = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    config = DecoderConfig(**{**shape, "mlp_hidden": 40, "ngram_buckets": 64, **changes})
    model = Decoder(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.15)
    return model.eval()


FAMILIES = {
    **{kind: lambda kind=kind: made(**KINDS[kind]).eval() for kind in KINDS},
    "decoder": decoder,
    "decoder without memory": lambda: decoder(ngram_orders=(), smear_keys=False, tie_embeddings=True),
}


def prompt_requests(max_tokens: int, **sampling: Any) -> list[Request]:
    """One request for each of `PROMPTS`; number n samples with seed n."""
    return [
        Request(id=str(n), ids=tuple(ids), sampling=SamplingParams(seed=n, **sampling), max_tokens=max_tokens)
        for n, ids in enumerate(PROMPTS)
    ]


def drain(engine: Engine) -> dict[str, list[Delta]]:
    """Run `engine` until it is idle; returns the deltas of each request. Checks the page accounting at every step."""
    out: dict[str, list[Delta]] = {}
    for _ in range(20_000):
        if not engine.busy:
            return out
        for delta in engine.step():
            out.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    raise AssertionError("the engine does not finish")


def tokens_of(deltas: list[Delta]) -> list[Token]:
    """The tokens of all deltas, in order."""
    return [token for delta in deltas for token in delta.tokens]


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Token]]:
    """Add the requests, run the engine until it is idle, and return the tokens of each request."""
    for request in requests:
        engine.add(request)
    out = drain(engine)
    return {request.id: tokens_of(out.get(request.id, [])) for request in requests}


def ids_of(out: dict[str, list[Token]]) -> dict[str, list[int]]:
    """Token ids of each request."""
    return {name: [token.id for token in tokens] for name, tokens in out.items()}


@torch.no_grad()
def expected(model: LanguageModel, ids: list[int], n_prompt: int) -> torch.Tensor:
    """Log-probabilities of the ids after the prompt, by the training forward."""
    log_probs = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    targets = torch.tensor(ids[n_prompt:])
    return log_probs[n_prompt - 1 : -1].gather(-1, targets[:, None])[:, 0]


def check(model: LanguageModel, requests: list[Request], out: dict[str, list[Token]]) -> None:
    for request in requests:
        tokens = out[request.id]
        assert len(tokens) == request.max_tokens
        want = expected(model, [*request.ids, *(t.id for t in tokens)], len(request.ids))
        got = torch.tensor([t.raw_log_prob for t in tokens])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
