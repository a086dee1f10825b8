"""Every kind of layer trains with the learner and generates with a KV cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import train, weights
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.engine import SamplingParams, generate
from whorl.models import Transformer, load_model, save_model
from whorl.train.checkpoint.format import load_latest

MIXERS: dict[str, dict[str, Any]] = {
    "heads": HEADS,
    "window": {**HEADS, "window": 5, "smear": True},
    "latent": {"kind": "latent", "n_heads": 2, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 16},
    "linear": {"kind": "linear", "options": {"n_heads": 2}},
    "pointwise": {"kind": "pointwise", "options": {"n_heads": 2}},
    "mamba": {"kind": "mamba"},
    "gru": {"kind": "gru"},
    "lstm": {"kind": "lstm"},
    "rnn": {"kind": "rnn"},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"), alphabet="abcd")


@pytest.mark.parametrize("kind", [*MIXERS, "experts", "capped"])
def test_mixer_learns_saves_and_samples(kind: str, tokens: Path, tmp_path: Path) -> None:
    more = {"experts": {"experts": EXPERTS}, "capped": {"logit_softcap": 8.0, "learned_positions": True}}
    config = shape(MIXERS.get(kind, HEADS), **more.get(kind, {}))
    notes = Notes()
    model = train(job(tokens, model=config, steps=80, seq_len=32), tmp_path / "run", notes)
    # Letters come in pairs. A letter costs log 4 = 1.39 nats without context, 1.07 with the previous letter, and 0.69
    # with its position in the pair, which 80 steps learn in part.
    assert notes.evaluations[-1]["held_out_nll"] < 1.15 < math.log(4)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model").eval()
    assert isinstance(again, Transformer) and again.config == config
    prompt, greedy = [5, 97, 97, 98], SamplingParams(temperature=0.0)
    written = [
        [t.id for t in generate(again, prompt, greedy, torch.Generator(), max_tokens=20, use_cache=kept)]
        for kept in (True, False)
    ]
    assert written[0] == written[1]
    letters = bytes(i for i in written[0] if i < 256)
    assert letters[:1] == b"b" and set(letters) <= set(b"abcd"), letters  # completes the pair


def test_moe_balance_equal_on_replicas_and_after_resume(tokens: Path, tmp_path: Path) -> None:
    config = shape(HEADS, experts=EXPERTS)
    wanted = job(tokens, model=config, steps=10, routing={"bias_update_rate": 0.01})
    notes = Notes()
    undisturbed = train(wanted, tmp_path / "a", notes)
    biases = {n: b for n, b in undisturbed.state_dict().items() if n.endswith("balance_bias")}
    assert len(biases) == 2 and all(b.abs().max() > 0.01 for b in biases.values())
    last = notes.steps[-1]
    assert (
        last["moe/0/dropped_fraction"] == 0
        and 0 <= last["moe/1/gini"] < 0.75
        and last["moe/aux_loss"] >= 0.99
    )
    assert sum(last[f"moe/0/load_fraction/{e}"] for e in range(4)) == pytest.approx(1)
    train(wanted, tmp_path / "b", stop_after=4, checkpoint_seconds=0.0)
    found = load_latest(tmp_path / "b")
    assert found is not None and "buffers/blocks.0.mlp.router.balance_bias" in found.tensors
    continued = train(wanted, tmp_path / "b")
    assert all(torch.equal(t, continued.state_dict()[n]) for n, t in undisturbed.state_dict().items())


def test_moe_dropout_is_seeded_by_step(tokens: Path, tmp_path: Path) -> None:
    config = shape(HEADS, experts={**EXPERTS, "expert_dropout": 0.3, "token_dropout": 0.2})
    wanted, notes = job(tokens, model=config, steps=8, evaluations=4), Notes()
    undisturbed = weights(train(wanted, tmp_path / "a", notes))
    again = Notes()
    train(wanted, tmp_path / "b", again, stop_after=4, checkpoint_seconds=0.0)
    continued = weights(train(wanted, tmp_path / "b", again))
    assert all(torch.equal(undisturbed[n], continued[n]) for n in undisturbed)
    assert notes.evaluations == again.evaluations  # validation drops nothing
    without = shape(HEADS, experts=EXPERTS)
    other = weights(train(wanted.model_copy(update={"model": without}), tmp_path / "c"))
    assert not all(torch.equal(undisturbed[n], other[n]) for n in undisturbed)


def test_lm_objective_separates_packed_documents(tokens: Path) -> None:
    """The loss of a packed row with segments equals the sum over its documents, for every mixer."""
    from whorl.models import make_model
    from whorl.parallel.process_group import ProcessGroup
    from whorl.train.config import RoutingConfig
    from whorl.train.lm.objective import LMObjective
    from whorl.train.metrics.moe_balance import MoEBalancer

    ids = torch.randint(0, 256, (1, 13), generator=torch.Generator().manual_seed(0))
    parts = [ids[:, :7], ids[:, 6:]]  # 6 targets each
    for kind, mixer in MIXERS.items():
        model = make_model(shape(mixer), torch.Generator().manual_seed(1))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        loss = LMObjective(
            model, MoEBalancer(model, RoutingConfig(), ProcessGroup()), z_loss=0.0, compile=False
        )
        alone = [
            loss({"tokens": p[:, :-1], "targets": p[:, 1:], "loss_mask": torch.ones(1, 6, dtype=torch.bool)})
            for p in parts
        ]
        packed = {
            "tokens": torch.cat([p[:, :-1] for p in parts], dim=1),
            "targets": torch.cat([p[:, 1:] for p in parts], dim=1),
            "loss_mask": torch.ones(1, 12, dtype=torch.bool),
            "segment_ids": torch.tensor([[1] * 6 + [2] * 6]),
            "positions": torch.tensor([[*range(6), *range(6)]]),
        }
        assert loss(packed).total.item() == pytest.approx(sum(x.total.item() for x in alone), rel=1e-4), kind
