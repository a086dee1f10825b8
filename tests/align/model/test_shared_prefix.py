"""Shared prompts: the same log-probabilities and gradients as plain rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.align.byte_model import decoder
from tests.support.tiny import decoder_config, draw_zero_parameters, transformer_config
from torch import Tensor
from torch.nn import functional as F

from whorl.align.config import LoRAConfig
from whorl.align.model import policy_model
from whorl.align.model import shared_prefix as room
from whorl.align.model.batch import pad
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.shared_prefix import find_shared_prefixes, supports_shared_prefix
from whorl.models import LanguageModel, make_model
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.tokens.token_encoder import concat


def part(prompts: list[list[int]], answers: list[list[int]], extra: int = 0) -> dict[str, Tensor]:
    """Return rows of a prompt and a completion each, and `extra` columns of padding."""
    rows = pad([concat(p, a) for p, a in zip(prompts, answers, strict=True)], 0, multiple=1)
    padding = {"tokens": 0, "targets": 0, "loss_mask": False, "sequence": -1}
    return {name: F.pad(rows[name], (0, extra), value=value) for name, value in padding.items()}


def ragged(seed: int = 0, groups: int = 4, answers: int = 4) -> dict[str, Tensor]:
    """Return groups with prompts and completions of different lengths, one completion empty."""
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 250, (n,), generator=g).tolist()

    prompts, completions = [], []
    for _ in range(groups):
        prompt = ids(int(torch.randint(1, 14, (), generator=g)))
        for k in range(answers):
            empty = k == 1 and len(prompt) > 1
            prompts.append(prompt)
            completions.append([] if empty else ids(int(torch.randint(1, 6, (), generator=g))))
    return part(prompts, completions, extra=2)


def transformer(**changes: Any) -> TransformerConfig:
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8} | changes.pop("heads", {})
    return transformer_config(mlp_hidden=48, mixers={"full": AttentionConfig(**heads)}, **changes)


MODELS: dict[str, Any] = {
    "decoder": decoder_config(n_heads=4, n_kv_heads=2, head_dim=8),
    "decoder, beyond its rows": decoder_config(n_kv_heads=2, ngram_orders=(), trained_length=8),
    "llama": transformer(), "qk norm, smeared": transformer(heads={"qk_norm": True, "smear": True}),
    "qk norm of all heads": transformer(heads={"qk_norm": "all_heads"}, sandwich=True, pre_norm=False),
    "window": transformer(heads={"window": 5}), "slopes": transformer(heads={"alibi": True, "rope": None}),
    "soft caps and sinks": transformer(heads={"softcap": 5.0, "sink": True}, logit_softcap=10.0),
    "learned positions": transformer(heads={"rope": None}, learned_positions=True),
    "shared keys": transformer(kv_sharing_factor=2), "parallel": transformer(parallel=True),
}  # fmt: skip


def network(config: Any, **options: Any) -> PolicyModel:
    g = torch.Generator().manual_seed(1)
    model: LanguageModel = make_model(config, g)
    draw_zero_parameters(model, g)  # zeros would hide errors
    return PolicyModel(model, temperature=0.8, banned_ids={0, 1}, **options)


def outcome(net: PolicyModel, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    net.zero_grad()
    output = net.log_probs(rows, entropy=True)
    weights = torch.linspace(-1, 1, len(output.log_prob))
    total = (output.log_prob * weights).sum() + (output.value.sum() if output.value is not None else 0.0)
    total.backward()
    found = {n: p.grad.to_dense().clone() for n, p in net.named_parameters() if p.grad is not None}
    return output.log_prob.detach(), found


def holds(net: PolicyModel, rows: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_shared_prefix(net.model) and find_shared_prefixes(rows) is not None
    shared, gradients = outcome(net, rows)
    with monkeypatch.context() as m:
        m.setattr("whorl.align.model.policy_model.supports_shared_prefix", lambda model: False)
        alone, expected = outcome(net, rows)
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(gradients, expected, rtol=2e-3, atol=3e-5)


@pytest.mark.parametrize("name", MODELS)
def test_shared_prefix_matches_plain_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds(network(MODELS[name], critic=name == "llama"), ragged(), monkeypatch)


def test_shared_prefix_with_irregular_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets with a gap (a conversation), a row without targets, a padding row, two equal rows."""
    rows = ragged(5, groups=3, answers=4)
    rows = {name: torch.cat([t, t[:1]]) for name, t in rows.items()}
    some = rows["loss_mask"].sum(1).argmax()
    rows["loss_mask"][some, rows["loss_mask"][some].nonzero()[1]] = False
    rows["loss_mask"][2] = False
    for name, nothing in (("loss_mask", False), ("sequence", -1), ("tokens", 0)):
        rows[name][3] = nothing
    holds(network(MODELS["decoder"]), rows, monkeypatch)


def test_gradients_have_same_bits_on_threads() -> None:
    """Eight completions follow each prompt: their gradients are summed in a fixed order."""
    config = MODELS["llama"].model_copy(update={"d_model": 256})
    net, rows = network(config), ragged(7, groups=16, answers=16)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first = outcome(net, rows)
        for _ in range(4):
            torch.testing.assert_close(outcome(net, rows), first, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


def test_shared_prefix_with_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(MODELS["llama"], lora=LoRAConfig(rank=2))
    with torch.no_grad():
        for p in net.factors.values():
            p.normal_(0.0, 0.1)
    holds(net, ragged(3), monkeypatch)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6))
def test_target_index_finds_every_target(seed: int, groups: int, answers: int) -> None:
    rows = ragged(seed, groups, answers)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(room, "MAX_POSITIONS_FRACTION", 10.0)
        found = find_shared_prefixes(rows)
    assert found is not None
    f, p, r, a = found.shape
    assert len(found.row) == len(found.column) == f * p + r * a
    places = torch.stack([found.row[found.target_index], found.column[found.target_index]], 1)
    rows_, columns = rows["loss_mask"].nonzero(as_tuple=True)
    assert torch.equal(places[:, 1], columns)
    first = found.target_index < f * p  # the last position of a prompt, which may come from another row
    assert torch.equal(places[~first, 0], rows_[~first])
    prefix = columns[first] + 1
    for here, prefix_row, n in torch.stack([rows_[first], places[first, 0], prefix], 1).tolist():
        assert torch.equal(rows["tokens"][here, :n], rows["tokens"][prefix_row, :n])


def test_repeated_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compiled(trunk: Any) -> Any:
        return lambda x, *rest: calls.append(x.shape[1]) or trunk(x, *rest)

    monkeypatch.setattr(policy_model, "compiled", compiled)
    net, counted = network(MODELS["llama"]), []
    for groups in (4, 5, 6):  # two of these three shapes
        rows = ragged(groups=groups)
        net.compiles = False
        expected = outcome(net, rows)
        net.compiles = True
        for _ in range(3):
            torch.testing.assert_close(outcome(net, rows), expected, rtol=2e-3, atol=3e-5)
        counted.append(len(calls))
    assert counted == [2, 4, 4] and all(positions % 8 == 0 for positions in calls)


def test_nothing_shared_uses_plain_rows() -> None:
    prompts = [[10 + r, 3, 4] for r in range(6)]
    assert find_shared_prefixes(part(prompts, [[7, 8, 9, 10]] * 6)) is None
    net = PolicyModel(decoder())
    assert net.log_probs(part(prompts, [[7, 8]] * 6)).log_prob.shape == (12,)


def test_unsupported_models() -> None:
    assert not supports_shared_prefix(make_model(transformer(heads={"block": 4})))
    model = make_model(transformer())
    model.checkpointed_blocks = 1
    assert not supports_shared_prefix(model)
