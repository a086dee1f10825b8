"""Effects that decide how generative models are trained, measured: a picture of eight panels, and a claim per effect.

`python bench/generative/lessons.py --picture docs/generative_lessons.png` takes about two minutes on one core.

    gan          both losses rise while samples improve: an update of one network raises the loss of the other
    likelihood   the mean negative log-likelihood less the entropy is the KL divergence
    manifold     two thin lines at any distance have infinite KL and JS = log 2, and only W falls with their distance
                 (Arjovsky et al. 2017, arXiv:1701.07875, example 1)
    lipschitz    the largest slope of a critic by the bound on it
    denoising    a denoiser of least squared error has the score of the noisy density
                 (Vincent 2011, doi:10.1162/NECO_a_00142)
    upsampling   transposed convolutions leave a checkerboard, before and after training, and resize-convolutions none
                 (Odena et al. 2016, doi:10.23915/distill.00003)
    gradients    reparameterised and score-function gradients of the ELBO have one mean and different variances
                 (Kingma & Welling 2014, arXiv:1312.6114, section 2.2)

Losses and slopes are those of held-out rows. A picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.generative._panels import Curves, Panel, add, draw, show

from whorl.generative.data import open_data
from whorl.generative.densities import GaussianMixture, make_density
from whorl.generative.distances import sliced_wasserstein, wasserstein
from whorl.generative.methods.gan import GAN
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.methods.score import ScoreMatching
from whorl.generative.methods.vae import VAE
from whorl.generative.task import GenerativeTask
from whorl.nn.convolution import Conv2d, ConvTranspose2d, ResizeConv, checkerboard_energy
from whorl.objectives.generative.diffusion import denoising
from whorl.objectives.generative.elbo import gaussian_log_prob, kl_from_prior
from whorl.tracking.seeds import generator
from whorl.train.learner.learner import Learner
from whorl.train.rows import train_rows

DENSITY = "8-gaussians"
HELD_OUT = sized(500, 50)  # rows
GAN_STEPS, FIT_STEPS, SCORE_STEPS, DECODER_STEPS, VAE_STEPS = sized(
    (1200, 400, 2000, 300, 300), (4, 4, 4, 2, 4)
)
POINTS = sized(50, 2)  # of a curve
FIT_SAMPLES, GRADIENTS, LINE = sized((200_000, 2**16, 400), (2000, 2**9, 50))
THICKNESS = 1e-3  # of the lines whose densities are compared
BOUNDS = ("none", "clip", "penalty", "spectral")
UPSAMPLING: Mapping[str, Callable[..., nn.Module]] = {
    "transposed, kernel 3": partial(ConvTranspose2d, kernel_size=3),
    "transposed, kernel 4": partial(ConvTranspose2d, kernel_size=4),
    "resized, nearest": ResizeConv,
    "resized, bilinear": partial(ResizeConv, mode="bilinear"),
}
CHANNELS = 16  # of the decoders
DISTANCE, LOSSES = "sliced Wasserstein", ("critic's loss", "generator's loss")
CHANGES = "by the critic's updates", "by its own updates", "sum"
LEAST = 1e-16  # energy that is shown


def task_of(method: str, **settings: Any) -> GenerativeTask:
    """Return a small task of the density."""
    sizes = {"width": 64, "depth": 2, "train": {}}
    return GenerativeTask(open_data(DENSITY), parse_config(method, {**sizes, **settings}))


def train_gan(curves: Curves, *, every: int, **settings: Any) -> None:
    """Train a GAN; add its held-out losses, the sums of their changes by each update, distance and slope."""
    task = task_of("gan", steps=GAN_STEPS, critic_steps=1, **settings)
    method, networks, rows = cast(GAN, task.method), cast(Any, task.networks), task.data.test[:HELD_OUT]
    held_out = {"data": rows, **method.draws(rows, None, generator(0, "held out"))}
    learner, by_update = Learner(networks, task.updates()), torch.zeros(2, 2)

    def losses() -> Tensor:
        both = method.loss(networks, held_out), method.generator_loss(networks, held_out)
        return torch.stack([loss.total.detach() / loss.count for loss in both])

    before = losses()
    for step in range(GAN_STEPS):
        batch = task.batch(step)
        for number, update in enumerate(learner.updates):
            update.accumulate(update.objective(batch))
            update.step(task.lr_scale(step))
            after = losses()
            by_update[number] += after - before
            before = after
        if step % every and step != GAN_STEPS - 1:
            continue
        fake = method.sample(networks, len(rows), generator(0, "samples"), DrawOptions())
        m = held_out["mix"][:, None]
        between = (m * rows + (1 - m) * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(networks["critic"](between).sum(), between)
        by_critic, by_own = by_update[:, 1].tolist()
        add(
            curves, step, {"slope": float(slopes.norm(dim=1).max()), DISTANCE: sliced_wasserstein(fake, rows)}
        )
        add(curves, step, dict(zip(LOSSES, before.tolist(), strict=True)))
        add(curves, step, dict(zip(CHANGES, (by_critic, by_own, by_critic + by_own), strict=True)))


def gan() -> list[Panel]:
    curves: Curves = {}
    train_gan(curves, every=sized(10, 1), loss="wasserstein", lipschitz="penalty")
    names = (DISTANCE, *LOSSES, *CHANGES)
    distance, critic, loss, by_critic, by_own, _ = (curves[name][1] for name in names)
    show("gan", distance=(distance[0], distance[-1]), critic=(min(critic), critic[-1]))
    show("generator's loss", loss=(loss[0], loss[-1]), by_critic=by_critic[-1], by_own=by_own[-1])
    claim(
        "sliced Wasserstein distance of a GAN's samples, last against first, while the losses of both networks rise",
        ours=distance[-1], peer=distance[0], unit="", ratio=distance[-1] / distance[0], bar=1 / 3, variant="gan",
        samples=[{name: curve[1][-1] for name, curve in curves.items()}],
        ok=distance[-1] < distance[0] / 3 and loss[-1] > loss[0] and critic[-1] > min(critic)
        and by_critic[-1] > 1 and by_own[-1] < -1,
    )  # fmt: skip
    first, second = ({name: curves[name] for name in part} for part in (names[:3], CHANGES))
    return [
        Panel("GAN: losses rise, the distance falls", first, {"xlabel": "step"}),
        Panel("Change of the generator's loss", second, {"xlabel": "step", "ylim": (-9, 5)}),
    ]


def lipschitz() -> list[Panel]:
    slopes: Curves = {}
    for bound in BOUNDS:
        curves: Curves = {}
        train_gan(curves, every=sized(20, 1), loss="non-saturating", lipschitz=bound)
        slopes[bound] = curves["slope"]
    last = {bound: curve[1][-1] for bound, curve in slopes.items()}
    show("largest slope", **last)
    claim(
        "largest slope of a critic after training: no bound against a penalty", ours=last["none"], peer=last["penalty"],
        unit="per unit", ratio=last["none"] / last["penalty"], bar=3.0, variant="lipschitz", samples=[last],
        ok=last["none"] > 3 * last["penalty"] and max(slopes["spectral"][1]) <= 1.001,
    )  # fmt: skip
    return [Panel("Largest slope of the critic", slopes, {"xlabel": "step", "yscale": "log"})]


def likelihood() -> list[Panel]:
    truth, rng, curves = make_density(DENSITY), generator(0, "likelihood"), Curves()
    side = torch.linspace(-3, 3, 241, dtype=torch.float64)
    grid, cell = torch.cartesian_prod(side, side), float(side[1] - side[0]) ** 2
    log_p, x = truth.log_prob(grid), truth.sample(FIT_SAMPLES, rng).double()
    p, means = log_p.exp() * cell, torch.randn(16, 2, generator=rng, dtype=torch.float64).requires_grad_()
    model, optimizer = GaussianMixture(means, 0.2), torch.optim.Adam([means], 0.02)
    names = "NLL - entropy, of samples", "KL, integrated"
    for step in range(FIT_STEPS + 1):
        if step % max(1, FIT_STEPS // 20) == 0:
            with torch.no_grad():
                nll = -float(torch.cat([model.log_prob(part) for part in x.split(10_000)]).mean())
                kl = float((p * (log_p - model.log_prob(grid))).sum())
            add(curves, step, {names[0]: nll + float((p * log_p).sum()), names[1]: kl})
        optimizer.zero_grad()
        (-model.log_prob(x[torch.randint(len(x), (500,), generator=rng)]).mean()).backward()
        optimizer.step()
    below, exact = (curves[name][1] for name in names)
    largest = max(abs(a / b - 1) for a, b in zip(below, exact, strict=True))
    show("likelihood", kl=(exact[0], exact[-1]), nll_less_entropy=(below[0], below[-1]), apart=largest)
    claim(
        "NLL less entropy against the integrated KL divergence: largest relative difference in training",
        ours=below[-1], peer=exact[-1], unit="nats", ratio=largest, bar=0.05, variant="likelihood",
        ok=largest < 0.05 and exact[-1] < exact[0] / 3, samples=[below, exact],
    )  # fmt: skip
    return [Panel("Maximum likelihood is least KL", curves, {"xlabel": "step", "yscale": "log"})]


def manifold() -> list[Panel]:
    rng, curves, divergence = generator(0, "lines"), Curves(), list[float]()
    across, cell = torch.linspace(-1.1, 1.1, 220_001, dtype=torch.float64)[:, None], 1e-5
    names = "Wasserstein", "JS (KL is infinite)"
    for theta in torch.linspace(-1, 1, 21).tolist():
        lines = [
            torch.stack([torch.full((LINE,), at), torch.rand(LINE, generator=rng)], 1) for at in (0, theta)
        ]
        densities = (GaussianMixture(torch.tensor([[at]]), THICKNESS) for at in (0, theta))
        log_p, log_q = (density.log_prob(across) for density in densities)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        js = float((log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum()) * cell / 2
        add(curves, theta, {names[0]: wasserstein(*lines), names[1]: js})
        divergence.append(float((log_p.exp() * (log_p - log_q)).sum()) * cell)
    distance, js_values, near = curves[names[0]][1], curves[names[1]][1], 11
    show("lines at distance 0.1", w=distance[near], js=js_values[near], kl=divergence[near])
    claim(
        "W of two thin lines at distance 0.1 against that at 1; JS is log 2 at both, and KL beyond 1,000 nats",
        ours=distance[near], peer=distance[-1], unit="", ratio=distance[near] / distance[-1], bar=0.2,
        ok=distance[near] < 0.2 * distance[-1] and min(js_values[near:]) > 0.999 * math.log(2) and divergence[near] > 1000,
        variant="manifold", samples=[distance, js_values, divergence],
    )  # fmt: skip
    return [Panel("Two thin lines", curves, {"xlabel": "distance"})]


def score() -> list[Panel]:
    task, curves = task_of("score", steps=SCORE_STEPS, width=128), Curves()
    method, mixture = cast(ScoreMatching, task.method), cast(GaussianMixture, task.data.density)
    rows, means = task.data.test[: 4 * HELD_OUT], mixture.means.double()
    draws = method.draws(rows, None, generator(0, "held out"))
    point, noise = method.path.at(draws["time"], rows), draws["noise"]
    x, s, exact, optimal = point.noisy(rows, noise), point.s.double(), list[Tensor](), list[Tensor]()
    for one, at in zip(x.double()[:, None], s.flatten().tolist(), strict=True):
        noisy = GaussianMixture(means, math.hypot(mixture.std, at))  # x_t is a mixture, too
        here = one.clone().requires_grad_()
        exact.append(torch.autograd.grad(noisy.log_prob(here).sum(), here)[0])
        share = (-(one - means).square().sum(1) / (2 * noisy.std**2)).softmax(0)
        kept = (mixture.std / noisy.std) ** 2  # the mean of x_0, given x_t and the component
        optimal.append(share @ (means + kept * (one - means)))
    right = s * torch.cat(exact)
    identity = float(((torch.stack(optimal) - x.double()) / s - right).abs().max())

    def error(a: Tensor, b: Tensor) -> float:
        return float(denoising(a, b).total) / len(a)

    least = error(right, -noise)

    def observe(step: int, metrics: Any = None) -> None:
        if step % max(1, SCORE_STEPS // POINTS) == 0 or step == SCORE_STEPS:
            with torch.no_grad():
                found = s * method.predict(task.networks, x, draws["time"], None)
            values = {"loss": error(found, -noise), "loss of the exact score": least}
            add(curves, step, {**values, "error of the score": error(found, right)})

    observe(0)
    train_rows(task, callback=observe)
    loss, wrong = curves["loss"][1], curves["error of the score"][1]
    show("denoising", loss=(loss[0], loss[-1]), least=least, error=(wrong[0], wrong[-1]), identity=identity)
    claim(
        "squared error of a trained denoiser's score, last against first step", ours=wrong[-1], peer=wrong[0],
        unit="of the noise", ratio=wrong[-1] / wrong[0], bar=0.1, variant="denoising", samples=[least, loss, wrong],
        ok=wrong[-1] < 0.1 * wrong[0] and abs(loss[0] - least - wrong[0]) < 0.1 * wrong[0] and identity < 1e-9,
    )  # fmt: skip
    return [Panel("Denoising learns the score", curves, {"xlabel": "step", "yscale": "log"})]


def upsampling() -> list[Panel]:
    energies: Curves = {}
    for name, layer in UPSAMPLING.items():
        rng = generator(0, "decoder")
        decoder = nn.Sequential(
            layer(1, CHANNELS, bias=True, generator=rng), nn.SiLU(),
            layer(CHANNELS, CHANNELS, bias=True, generator=rng), nn.SiLU(), Conv2d(CHANNELS, 1, 3, generator=rng),
        )  # fmt: skip
        optimizer = torch.optim.Adam(decoder.parameters(), 3e-3)
        for step in range(DECODER_STEPS + 1):
            if step % max(1, DECODER_STEPS // 20) == 0:
                found = checkerboard_energy(decoder, 1, 4, margin=3, generator=generator(0, "constant"))
                add(energies, step, {name: max(found, LEAST)})
            small = torch.randn(32, 1, 8, 8, generator=rng)
            large = nn.functional.interpolate(small, scale_factor=4.0, mode="bicubic")
            optimizer.zero_grad()
            denoising(decoder(small), large).total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    last = {name: curve[1][-1] for name, curve in energies.items()}
    show("checkerboard", **{name: (curve[1][0], curve[1][-1]) for name, curve in energies.items()})
    least, most = (
        pick(v for n, v in last.items() if n.startswith(k)) for pick, k in ((min, "t"), (max, "r"))
    )
    claim(
        "share of a trained decoder's energy in patterns of period 4: transposed against resize-convolutions",
        ours=least, peer=most, unit="share", ratio=least / most, bar=100.0, variant="upsampling",
        ok=least > 100 * most, samples=[energies],
    )  # fmt: skip
    return [Panel("Checkerboard: share of the energy", energies, {"xlabel": "step", "yscale": "log"})]


def gradients() -> list[Panel]:
    task, curves = task_of("vae", steps=VAE_STEPS, latent=32), Curves()
    train_rows(task)
    method, networks = cast(VAE, task.method), cast(Any, task.networks)
    row = task.data.test[:1].expand(GRADIENTS, -1)
    with torch.no_grad():
        posterior = method.posterior(networks, row)
    mean, log_std = (t.clone().requires_grad_() for t in posterior)
    noise = torch.randn(mean.shape, generator=generator(0, "noise"))
    z, kl = mean + log_std.exp() * noise, kl_from_prior(mean, log_std).sum()
    fit = gaussian_log_prob(row, networks.decoder(z), networks.log_std)
    by_score = (fit.detach() * gaussian_log_prob(z.detach(), mean, log_std)).sum()
    one, other = (
        torch.cat(torch.autograd.grad(total - kl, (mean, log_std), retain_graph=True), 1).double()
        for total in (by_score, fit.sum())
    )
    ours, peer = (float(g.var(0).sum()) for g in (one, other))
    apart = float(((one - other).mean(0) / ((one - other).std(0) / math.sqrt(GRADIENTS))).abs().max())
    show("gradients", variance=(ours, peer), ratio=ours / peer, means_apart_in_standard_errors=apart)
    claim(
        "variance of the score-function gradient of an ELBO against the reparameterised one, at equal means",
        ours=ours, peer=peer, unit="", ratio=ours / peer, bar=3.0, ok=ours > 3 * peer and apart < 4.5,
        variant="gradients", samples=[apart],
    )  # fmt: skip
    for size in (2**k for k in range(GRADIENTS.bit_length() - 4)):
        errors = (
            float((g.view(-1, size, g.shape[1]).mean(1) - other.mean(0)).square().sum(1).mean().sqrt())
            for g in (one, other)
        )
        add(curves, size, dict(zip(("score function", "reparameterised"), errors, strict=True)))
    axes = {"xlabel": "draws", "xscale": "log", "yscale": "log"}
    return [Panel("Error of an ELBO's gradient", curves, axes)]


EFFECTS: Mapping[str, Callable[[], list[Panel]]] = {
    "gan": gan, "likelihood": likelihood, "manifold": manifold, "lipschitz": lipschitz, "denoising": score,
    "upsampling": upsampling, "gradients": gradients,
}  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=EFFECTS)
        parser.add_argument("--picture", type=Path)

    args = parse(__doc__, arguments, smoke={})
    torch.set_num_threads(1)
    panels = [
        panel for name, measured in EFFECTS.items() if args.only in (None, name) for panel in measured()
    ]
    if args.picture is not None:
        draw(panels, args.picture)


if __name__ == "__main__":
    main()
