"""Optimizers by name: SOAP against Adam in its basis, one from outside the package, and wrong names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tests.support.align.kill_at_step import same_weights
from tests.support.train.pretraining import assert_close, train
from tests.support.train.tiny import Notes, job

from whorl.align.config import SFTConfig
from whorl.errors import ConfigError
from whorl.train.config import OPTIMIZERS, OptimConfig
from whorl.train.optim.optimizer import get_optimizer
from whorl.train.optim.optimizers import AdamW
from whorl.train.optim.soap import SOAP

SIGN = "tests.support.train.sign_optimizer:SignMomentum"


def test_soap_is_adam_in_the_eigenbasis_of_the_first_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    start, first = torch.randn(6, 9, generator=g), torch.randn(6, 9, generator=g)
    ours = start.clone()
    soap = SOAP({"w": ours}, {"w": 0.02}, every=1000, weight_decay=0.1, decay_scale={"w": 1.0})
    soap.step({"w": torch.zeros(6, 9)}, 1.0)  # no basis yet
    soap.step({"w": first}, 1.0)
    assert torch.equal(ours, start)
    left, right = (soap.moments["w"][f"{side}_basis"].clone() for side in ("left", "right"))
    singular = left.mT @ first @ right
    torch.testing.assert_close(
        singular.abs()[:, :6], torch.diag(torch.linalg.svdvals(first)), atol=1e-4, rtol=1e-4
    )
    rotated = left.mT @ start @ right
    adam = AdamW(
        [("w", rotated)], {"w": 0.02}, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1, decay_scale={"w": 1.0}
    )
    for _ in range(6):
        gradient = torch.randn(6, 9, generator=g)
        soap.step({"w": gradient}, 0.5)
        adam.step({"w": left.mT @ gradient @ right}, 0.5)
    torch.testing.assert_close(ours, left @ rotated @ right.mT, atol=2e-5, rtol=1e-4)


def test_soap_basis_follows_the_gradients() -> None:
    """It stays orthonormal and makes the mean products diagonal."""
    g = torch.Generator().manual_seed(1)
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5])[:, None]
    turn = torch.linalg.qr(torch.randn(5, 5, generator=g)).Q
    soap = SOAP({"w": torch.zeros(5, 7)}, {"w": 1e-3}, every=2)
    soap.step({"w": torch.randn(5, 7, generator=g)}, 1.0)
    for _ in range(200):
        soap.step({"w": turn @ (scales * torch.randn(5, 7, generator=g))}, 1.0)
    basis = soap.moments["w"]["left_basis"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(5), atol=1e-5, rtol=0)
    products = basis.mT @ soap.moments["w"]["left"] @ basis
    off = products - torch.diag(products.diagonal())
    assert off.norm() < 0.2 * products.norm() and (products.diagonal().diff() < 0).all()
    with pytest.raises(ConfigError, match=r"shape \[3\].*\n.*a matrix"):
        SOAP({"gain": torch.zeros(3)}, {"gain": 1.0})


@pytest.mark.parametrize("name", ["soap", SIGN])
def test_optimizer_learns_resumes_and_agrees_with_replicas(name: str, tokens: Path, tmp_path: Path) -> None:
    """The second is outside of the package: no file of it knows the name."""
    optim = OptimConfig(optimizer=name, lr_adamw=0.003)
    notes, wanted = Notes(), job(tokens, steps=24, optim=optim)
    whole = train(wanted, tmp_path / "whole", notes)
    assert notes.steps[-1]["nll"] < notes.steps[0]["nll"] - 0.5
    train(wanted, tmp_path / "cut", stop_after=13)
    assert same_weights(whole, train(wanted, tmp_path / "cut"))
    both = Notes()
    two = train(wanted.model_copy(update={"replicas": 2}), tmp_path / "two", both)
    assert both.steps[-1]["nll"] == pytest.approx(notes.steps[-1]["nll"], abs=0.05)
    if name != "soap":  # an eigenvector of an eigenvalue near 0 is arbitrary, so that SOAP amplifies rounding
        assert_close(whole, two)


def test_unknown_optimizer_is_refused() -> None:
    for config in (OptimConfig, SFTConfig):
        with pytest.raises(ValidationError, match=r"muon, adamw, soap.*did you mean .adamw."):
            config.model_validate({"optimizer": "adamv"})
    assert OptimConfig(optimizer="soap").optimizer == "soap" and "soap" in OPTIMIZERS
    for path, words in (("nothing.here:X", "cannot be imported"), ("json:loads", "is no optimizer")):
        with pytest.raises(ConfigError, match=words):
            get_optimizer(path)
