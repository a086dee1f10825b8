"""The encoder: against torch's layer, with padding, and learning a task that needs both directions."""

from __future__ import annotations

import pytest
import torch
from tests.support.models.initialization import draw_zeros
from tests.support.models.initialization import generator as gen
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.encoder import Encoder, EncoderBlock, EncoderConfig, mean_pool
from whorl.nn.norm import LayerNorm
from whorl.objectives.classify import classification
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import train_loop
from whorl.train.learner.update import Update, all_adamw


def encoder(dtype: torch.dtype = torch.float32, **change: int) -> Encoder:
    shape = {"vocab_size": 11, "d_model": 16, "n_layers": 2, "n_heads": 2, "mlp_hidden": 24, "max_length": 12}
    config = EncoderConfig.model_validate({**shape, "n_classes": 3, **change})
    return draw_zeros(Encoder(config, gen(1), dtype))


TEXTS = ([1, 2, 3, 4, 5], [6, 7], [8], [])


def rows(left: int, right: int) -> tuple[Tensor, Tensor]:
    """TEXTS between paddings of arbitrary ids, and the mask."""
    ids = torch.randint(0, 11, (len(TEXTS), left + max(map(len, TEXTS)) + right), generator=gen(5))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for n, text in enumerate(TEXTS):
        ids[n, left : left + len(text)] = torch.tensor(text, dtype=torch.int64)
        mask[n, left : left + len(text)] = True
    return ids, mask


def test_encoder_block_matches_torch_with_gradients() -> None:
    block = draw_zeros(EncoderBlock(16, 2, 24, generator=gen()))
    reference = nn.TransformerEncoderLayer(16, 2, 24, 0.0, "gelu", batch_first=True, norm_first=True)
    a, m, attention = block.attention, block.mlp, reference.self_attn
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([a.q.weight, a.k.weight, a.v.weight]))
        attention.in_proj_bias.copy_(torch.cat([a.q.bias, a.k.bias, a.v.bias]))
        for to, source in (
            (attention.out_proj, a.out), (reference.linear1, m.up), (reference.linear2, m.down),
            (reference.norm1, block.attention_norm), (reference.norm2, block.mlp_norm),
        ):  # fmt: skip
            to.weight.copy_(source.weight)
            to.bias.copy_(source.bias)
    x = torch.randn(3, 7, 16, generator=gen(2), requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    output, want = block(x, segments=mask.long()), reference(x, src_key_padding_mask=~mask)
    torch.testing.assert_close(output[mask], want[mask], atol=1e-5, rtol=1e-4)
    upstream = torch.randn(x.shape, generator=gen(3)) * mask[..., None]
    found = torch.autograd.grad(output, [x, a.q.weight], upstream, retain_graph=True)
    wanted = torch.autograd.grad(want, [x, attention.in_proj_weight], upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other[: len(one)], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("left", "right"), [(0, 3), (3, 0), (2, 1)])
def test_encoder_ignores_padding(left: int, right: int) -> None:
    model = encoder()
    torch.testing.assert_close(model(*rows(left, right)), model(*rows(0, 0)), atol=1e-5, rtol=1e-4)
    alone = torch.cat([model(torch.tensor([t])) for t in TEXTS if t])
    torch.testing.assert_close(model(*rows(left, right))[: len(alone)], alone, atol=1e-5, rtol=1e-4)


def test_encoder_empty_row_is_zero_without_nan() -> None:
    model = encoder()
    ids, mask = rows(1, 1)
    pooled = model.pool(ids, mask)
    assert not pooled[-1].any() and pooled[:-1].any(dim=1).all()
    model.embed(ids, mask).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    poison = torch.full((2, 3, 4), float("nan"))  # values at padding are arbitrary
    assert not mean_pool(poison, torch.zeros(2, 3, dtype=torch.bool)).any()


def test_encoder_attends_in_both_directions() -> None:
    model = encoder()
    ids = torch.tensor([[1, 2, 3, 4]])
    first = model.hidden(ids)[0, 0]
    for place in range(1, 4):
        other = ids.clone()
        other[0, place] = 9
        assert (model.hidden(other)[0, 0] - first).abs().max() > 1e-4


def test_encoder_causal_pools_first_end_token() -> None:
    model = encoder(causal=True, end_id=9, norm_eps=1e-2)
    ids = torch.tensor([[1, 2, 9, 4, 9], [9, 5, 6, 7, 8], [0, 9, 3, 2, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    pooled = model.pool(ids, mask)
    for row, text in enumerate(([1, 2, 9], [9], [3, 2, 9])):  # without later tokens and padding
        hidden = model.hidden(torch.tensor([text]))
        torch.testing.assert_close(pooled[row], hidden[0, -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(model.pool(torch.tensor([text]))[0], hidden[0, -1])
    assert {m.eps for m in model.modules() if isinstance(m, LayerNorm)} == {1e-2}
    with pytest.raises(ConfigError, match="row 1 of ids has no real token end_id"):
        model.pool(ids, mask & torch.tensor([[True], [False], [True]]))
    compiled = torch.compile(model.pool, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, mask), pooled)


def test_encoder_embeddings_are_fp32_unit_vectors_in_bf16() -> None:
    ids, mask = rows(0, 0)
    exact, low = (encoder(t).embed(ids, mask) for t in (torch.float32, torch.bfloat16))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low[:-1].norm(dim=1), torch.ones(3))
    torch.testing.assert_close(low, exact, atol=0.05, rtol=0)


def test_encoder_every_parameter_gets_a_gradient() -> None:
    model = encoder()
    ids = torch.randint(0, 11, (8, 12), generator=gen(3))
    ids[0, :11] = torch.arange(11)  # every word
    (model(ids) * torch.randn(8, 3, generator=gen(4))).sum().backward()
    for name, p in model.named_parameters():
        # softmax cancels a key bias
        assert p.grad is not None and (p.grad.abs().max() > 1e-6 or name.endswith("attention.k.bias")), name


def test_encoder_learns_word_order() -> None:
    """Both classes have the same words; only the order of two words differs."""
    model = encoder(vocab_size=8, d_model=32, mlp_hidden=64, max_length=9, n_classes=2)

    def batch(seed: int, n: int = 64) -> dict[str, Tensor]:
        g = gen(seed)
        ids = torch.randint(3, 8, (n, 9), generator=g)
        length = torch.randint(4, 10, (n, 1), generator=g)
        scores = torch.rand(n, 9, generator=g).masked_fill(torch.arange(9) >= length, 2.0)
        places = scores.argsort(dim=1)[:, :2]
        ids.scatter_(1, places, torch.tensor([[1, 2]]).expand(n, -1))
        return {"ids": ids, "mask": torch.arange(9) < length, "labels": (places[:, 0] < places[:, 1]).long()}

    update = Update(lambda p: classification(model(p["ids"], p["mask"]), p["labels"]), all_adamw(model, 3e-3))
    learner, numbers = Learner(model, [update]), iter(range(1, 1000))
    train_loop(learner, numbers, lambda n: [[batch(n)]], last=200, lr_scale=lambda s: min(1, (s + 1) / 20))
    test = batch(0, 500)
    correct = model(test["ids"], test["mask"]).argmax(dim=1) == test["labels"]
    assert correct.float().mean() > 0.95


def test_encoder_rejects_bad_input() -> None:
    with pytest.raises(ConfigError, match="n_classes is 0"):
        encoder(n_classes=0)(torch.tensor([[1]]))
    with pytest.raises(ConfigError, match="mask is"):
        encoder().embed(torch.tensor([[1, 2]]), torch.tensor([[1, 1]]))
    with pytest.raises(ConfigError, match="position 12"):
        encoder().embed(torch.ones(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"end_id \(11\) must be below vocab_size"):
        encoder(end_id=11)
    with pytest.raises(ValueError, match="n_heads"):
        encoder(n_heads=3)
