"""Autoencoders: a linear VAE against probabilistic PCA, bounds, VQ-VAE under replicas, samples of densities and pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.support.images import write_half_dark

from whorl.errors import ConfigError
from whorl.generative.data import Data, DataInfo, open_data
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.task import GenerativeTask
from whorl.models.autoencoder import Autoencoder, VectorCoder, grid_side, make_coders
from whorl.train.learner.learner import Learner
from whorl.train.rows import train_rows


def task_of(data: Data, method: str, **settings: Any) -> GenerativeTask:
    return GenerativeTask(data, parse_config(method, settings))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("pictures")
    write_half_dark(folder)
    return open_data("half-dark", folder)


def test_linear_vae_reaches_probabilistic_pca() -> None:
    """Maximum likelihood of x = W z + noise in closed form: Tipping & Bishop 1999, eq. 7 and 8."""
    rng = torch.Generator().manual_seed(0)
    d, latent = 6, 2
    mixing = torch.randn(d, latent, generator=rng)
    x = torch.randn(200, latent, generator=rng) @ mixing.t() + 0.5 * torch.randn(200, d, generator=rng)
    x = x - x.mean(0)
    eigenvalues = torch.linalg.eigvalsh((x.t() @ x / len(x)).double()).flip(0)
    noise = float(eigenvalues[latent:].mean())
    determinant = float(eigenvalues[:latent].log().sum()) + (d - latent) * math.log(noise)
    exact = -(d * math.log(2 * math.pi) + determinant + d) / 2
    info = DataInfo(name="x", shape=(d,), fingerprint="x")
    method = METHODS["vae"](parse_config("vae", {"latent": latent}), info)
    coders = VectorCoder(d, 2 * latent, 16, 0, rng=rng), VectorCoder(latent, d, 16, 0, rng=rng)
    networks = Autoencoder(*coders, log_std=True)
    optimizer = torch.optim.Adam(networks.parameters(), 0.05)
    for step in range(800):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / 800)
        loss = method.loss(networks, {"data": x, **method.draws(x, None, rng)})
        optimizer.zero_grad()
        (loss.total / loss.count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        losses = [method.loss(networks, {"data": x, **method.draws(x, None, rng)}) for _ in range(50)]
    bound = -sum(float(loss.total / loss.count) for loss in losses) / 50
    tighter = float(method.log_likelihood(networks, x).mean())
    assert exact - 0.02 * abs(exact) < bound < exact + 0.02, (bound, exact)  # 0.02: of the samples' noise
    assert bound - 0.02 < tighter < exact + 1e-3 and tighter > exact - 0.05
    assert networks.log_std is not None
    assert float(networks.log_std.detach().exp()) == pytest.approx(math.sqrt(noise), rel=0.03)


def test_vqvae_puts_samples_on_the_modes() -> None:
    data = open_data("8-gaussians")
    task = task_of(
        data, "vqvae", width=64, depth=2, batch_size=128, lr=4e-3, steps=500, codes=32, code_decay=0.95
    )
    train_rows(task)
    x = task.method.sample(task.networks, 1000, torch.Generator().manual_seed(0), DrawOptions())
    assert data.density is not None
    near = data.density.log_prob(x) > -4
    angles = torch.atan2(x[near, 1], x[near, 0]) / (2 * torch.pi) * 8
    counts = (angles.round().long() % 8).bincount(minlength=8)
    assert float(near.double().mean()) > 0.6 and counts.min() > 20, counts
    rows = data.test[:500]
    gap = float((data.density.log_prob(rows) - task.method.log_likelihood(task.networks, rows)).mean())
    assert -0.05 < gap < 2.0  # nats: the bound lies below the density


@pytest.mark.parametrize("method", ["ae", "vae", "vqvae"])
def test_pictures_are_reconstructed_and_drawn(method: str, pictures: Data) -> None:
    task = task_of(pictures, method, steps=40, batch_size=24, width=16, depth=1, lr=5e-3)
    before = task.held_out_loss()
    train_rows(task)
    assert task.held_out_loss() < before - 0.1 * abs(before)
    assert set(task.method.diagnose(task.networks, pictures)) == {
        "ae": {"reconstruction_mse"}, "vae": {"kl", "units", "collapsed_units"},
        "vqvae": {"code_perplexity", "codes_used"},
    }[method]  # fmt: skip
    error = (task.method.reconstruct(task.networks, pictures.test) - pictures.test).square().mean()
    assert float(error.detach()) < 0.8 * float(pictures.test.var(0).mean()), error
    rng = torch.Generator().manual_seed(0)
    if method == "ae":
        with pytest.raises(ConfigError, match="ae has no distribution to draw from"):
            task.method.sample(task.networks, 1, rng, DrawOptions())
        return
    draws = [
        task.method.sample(task.networks, 6, rng.manual_seed(0), DrawOptions(labels=torch.full((6,), label)))
        for label in (0, 1)
    ]
    assert draws[0].shape == (6, 3, 8, 8) and not torch.equal(draws[0], draws[1])
    assert task.method.log_likelihood(task.networks, pictures.test).isfinite().all()


def test_collapsed_units_and_dead_codes_are_counted(pictures: Data) -> None:
    vae = task_of(pictures, "vae", width=16, batch_size=12, latent=4)
    last: Any = vae.networks.get_submodule("encoder.last")
    with torch.no_grad():
        last.weight[1:4].zero_()  # the means of three units of four
        last.weight[5:].zero_()
        last.bias[0] = 1.0
    assert vae.method.diagnose(vae.networks, pictures)["collapsed_units"] == 3
    vq = task_of(pictures, "vqvae", width=16, batch_size=12, codes=8)
    with torch.no_grad():
        vq.networks.get_parameter("moments")[1:, 1:] = 1e3  # far from every latent
    found = vq.method.diagnose(vq.networks, pictures)
    assert found["code_perplexity"] == pytest.approx(1) and found["codes_used"] == 1 / 8


def test_code_step_sums_micro_batches_and_restarts(pictures: Data) -> None:
    """Two halves of a batch give the step of the whole; the first step makes a latent of every code."""
    moved = []
    for parts in (1, 2):
        task = task_of(pictures, "vqvae", width=16, batch_size=12, codes=8)
        batch, method = task.batch(0), cast(Any, task.method)
        latents = method.encode(task.networks, batch["data"], batch["labels"])[0].detach()
        update = Learner(task.networks, task.updates()).updates[1]
        for part in range(parts):
            update.accumulate(update.objective({n: t[part::parts] for n, t in batch.items()}))
        update.step(1.0)
        moved.append(task.networks.get_parameter("moments").detach().clone())
    torch.testing.assert_close(moved[0], moved[1])
    found = moved[0][:, 1:] / moved[0][:, :1]
    unused = moved[0][:, 0] < 1 / 8 + 1e-5
    distances = torch.cdist(found[unused], latents.flatten(0, 1)).min(1).values
    assert unused.any() and float(distances.max()) < 1e-3


def test_vqvae_is_equal_under_two_replicas(pictures: Data, tmp_path: Path) -> None:
    settings = {"steps": 4, "width": 16, "depth": 1, "batch_size": 12, "codes": 8, "n_heads": 2}
    one = task_of(pictures, "vqvae", **settings)
    two = task_of(pictures, "vqvae", **settings, run={"replicas": 2})
    train_rows(one)
    train_rows(two, checkpoint_dir=tmp_path)
    found = dict(two.networks.named_parameters())
    for name, p in one.networks.named_parameters():
        torch.testing.assert_close(p, found[name], atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("grid", [False, True])
def test_coders_of_scenes_have_a_grid_of_eight(grid: bool) -> None:
    encoder, decoder = make_coders((3, 32, 32), 5, 5, 16, 1, grid=grid, n_classes=4)
    z = encoder(torch.zeros(2, 3, 32, 32), torch.tensor([0, 3]))
    assert z.shape == ((2, 64, 5) if grid else (2, 5)) and decoder(z).shape == (2, 3, 32, 32)
    assert not torch.equal(z[0], z[1])
    with pytest.raises(ConfigError, match="multiple of 4"):
        grid_side(30)


def test_prior_needs_an_even_head(pictures: Data) -> None:
    with pytest.raises(ConfigError, match="even multiple of n_heads"):
        task_of(pictures, "vqvae", width=20, batch_size=12)
