"""CLIP and the Flamingo captioner: interface, initialization, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.models.initialization import draw_zeros
from tests.support.models.initialization import generator as gen
from tests.support.tiny import decoder_config
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models import Transformer
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.vision.clip import DualEncoder, straight_through_clamp
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.vit import ViT
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import next_token
from whorl.train.learner.learner import Learner
from whorl.train.learner.update import Update, all_adamw


def vit(pooling: Any = "class") -> ViT:
    shape = {"d_model": 12, "n_layers": 2, "n_heads": 2, "mlp_hidden": 16}
    return draw_zeros(ViT(8, 4, 3, 6, **shape, pooling=pooling, generator=gen()))


def dual() -> DualEncoder:
    shape = EncoderConfig(vocab_size=9, d_model=16, n_layers=2, n_heads=2, mlp_hidden=24, max_length=5)
    return DualEncoder(vit(), draw_zeros(Encoder(shape, gen(1))), gen(2))


def decoder(ngrams: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Transformer:
    shape = decoder_config(vocab_size=9, d_model=16, n_layers=3, head_dim=8, ngram_orders=ngrams)
    return draw_zeros(Transformer(shape, gen(3), dtype))


def captioner(**options: Any) -> Captioner:
    return Captioner(decoder(), vit(), generator=gen(5), **options)


IDS = torch.randint(0, 9, (3, 7), generator=gen(4))


def images(n: int = 3) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=gen(9))


def test_clip_towers_give_unit_vectors_despite_padding() -> None:
    model = dual()
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [0, 0, 0, 0, 0]])
    x, y, scale = model(images(), ids, ids != 0)
    assert x.shape == y.shape == (3, 6)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(y.norm(dim=1), torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(model.embed_texts(ids[:1, :3]), y[:1])
    assert float(scale.detach()) == pytest.approx(1 / 0.07, rel=1e-5)


def test_clip_every_parameter_gets_a_gradient() -> None:
    model = dual()
    ids = torch.arange(9).repeat(2)[:15].view(3, 5)
    info_nce(*model(images(), ids)).total.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and (p.grad.any() or name.endswith("k.bias")), name


def test_clip_scale_is_bounded_and_can_decrease() -> None:
    model = dual()
    model.log_scale.data.fill_(5.0)
    assert float(model.scale.detach()) == pytest.approx(100.0, rel=1e-5)
    for raw, sign, passes in ((5.0, 1.0, True), (5.0, -1.0, False), (4.0, 1.0, True), (4.0, -1.0, True)):
        t = torch.tensor(raw, requires_grad=True)
        (gradient,) = torch.autograd.grad(sign * straight_through_clamp(t, math.log(100.0)), t)
        assert float(gradient) == (sign if passes else 0.0)
    wide = DualEncoder(vit(), Encoder(model.text.config, gen(1)), gen(2), max_logit_scale=200.0)
    for log_scale, scale in ((math.log(150.0), 150.0), (6.0, 200.0)):
        wide.log_scale.data.fill_(log_scale)
        assert float(wide.scale.detach()) == pytest.approx(scale, rel=1e-5)
    with pytest.raises(ConfigError, match="classes of the image tower is 0"):
        DualEncoder(ViT(8, 4, 3, 0, d_model=12, n_layers=1, n_heads=2), model.text)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_vit_tokens_are_pooled_by_head(pooling: Any) -> None:
    model = vit(pooling)
    tokens = model.tokens(images())
    assert tokens.shape == (3, 5 if pooling == "class" else 4, 12)
    pooled = tokens[:, 0] if pooling == "class" else tokens.mean(dim=1)
    assert torch.equal(pooled, model.features(images()))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captioner_starts_as_unchanged_language_model(every: int, dtype: torch.dtype) -> None:
    language = decoder(dtype=dtype)
    want = language(IDS)
    model = Captioner(language, vit(), cross_attn_every=every, generator=gen(5))
    assert len(model.bridges) == {1: 3, 2: 2, 3: 1}[every]
    assert torch.equal(model(IDS, model.encode_images(images())), want)
    with torch.no_grad():
        for bridge in model.bridges:
            bridge.attention_gate.fill_(0.5)
    changed, flipped = (model(IDS, model.encode_images(x)) for x in (images(), images().flip(0)))
    assert (changed - want).abs().max() > 1e-2 and (changed - flipped).abs().max() > 1e-2


def test_captioner_trains_gates_first_and_bridges_only() -> None:
    model, targets = captioner(), IDS[:, 1:].flatten()

    def objective(pictures: Any) -> Any:
        hidden = model(IDS[:, :-1], model.encode_images(pictures)).flatten(0, 1)
        return next_token(hidden, model.decoder.head_weight, targets, torch.ones_like(targets))

    objective(images()).total.backward()
    moving = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moving == {f"bridges.{i}.{which}_gate" for i in range(3) for which in ("attention", "mlp")}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    update = Learner(model, [Update(objective, all_adamw(model, 1e-2, "bridges."))]).updates[0]
    for _ in range(3):
        update.accumulate(objective(images()))
        update.step(1.0)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not name.startswith("bridges."), name


def test_captioner_decodes_in_pieces_like_one_forward() -> None:
    model = Captioner(decoder((2, 3)), vit(), cross_attn_every=2, generator=gen(5))
    draw_zeros(model.bridges)  # gates too
    context = model.encode_images(images())
    whole = model(IDS, context)
    for cuts in ([1] * 7, [1, 3, 3]):
        state = model.decoder.new_state(3, 7)
        pieces = torch.cat([model(part, context, state) for part in IDS.split(cuts, dim=1)], dim=1)
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_captioner_generate_is_greedy_up_to_eos() -> None:
    model, batch = captioner(), images(8)
    draw_zeros(model.bridges)
    free = model.generate(batch, bos_id=1, eos_id=99, max_tokens=5)
    context = model.encode_images(batch)
    ids = torch.ones(8, 1, dtype=torch.int64)
    for _ in range(5):  # without a state
        logits = model.decoder.logits(model(ids, context)[:, -1:])
        ids = torch.cat([ids, logits.argmax(dim=-1)], dim=1)
    assert free == ids[:, 1:].tolist()
    end = free[0][2]
    closed = model.generate(batch, bos_id=1, eos_id=end, max_tokens=5)
    assert closed == [row[: row.index(end)] if end in row else row for row in free]
    assert model.generate(batch, 1, 2, 0) == [[]] * 8


def test_gated_cross_attention_matches_torch() -> None:
    bridge: Any = draw_zeros(captioner().bridges[0])
    h, context = torch.randn(2, 5, 16, generator=gen(6)), torch.randn(2, 4, 12, generator=gen(7))
    a = bridge.attention
    q, k, v = a.q(bridge.attention_norm(h)), *(w(bridge.context_norm(context)) for w in (a.k, a.v))
    q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in (q, k, v))
    attended = a.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    want = h + bridge.attention_gate.tanh() * attended
    want = want + bridge.mlp_gate.tanh() * bridge.mlp(bridge.mlp_norm(want))
    torch.testing.assert_close(bridge(h, context), want, atol=1e-5, rtol=1e-4)


def test_captioner_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="cross_attn_every is 0"):
        captioner(cross_attn_every=0)
    with pytest.raises(ConfigError, match="n_heads is 3"):
        captioner(n_heads=3)
    with pytest.raises(ConfigError, match="context is"):
        captioner()(IDS[:2], torch.zeros(3, 4, 12))
