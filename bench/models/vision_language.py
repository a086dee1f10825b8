"""CLIP and a Flamingo-style captioner on drawn scenes of two shapes, such as "a red circle left of a blue square".

    python bench/models/vision_language.py [--quick]

112 captions: an ordered pair of 8 objects (4 colours, 2 shapes) and one of two relations. The same four content words
occur in several captions, so their order matters. 20 captions are held out. Every picture is drawn with random places,
sizes, shades and noise.

1. CLIP: a ViT and a text encoder are trained on pictures with captions. Recall@1 of held-out pictures against all 112
   captions (chance 1/112), for trained and for held-out captions.
2. A small decoder is trained on the other 92 captions as text. Then it and the CLIP's ViT are frozen, and gated
   cross-attention is trained to caption. A caption is correct if every word of the greedy caption is (chance about 1/112).

Three seeds, each with its own held-out captions and weights. --quick: one seed, fewer steps, lower bars.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.models import Transformer, whorl_decoder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.vit import ViT
from whorl.objectives.contrastive import info_nce
from whorl.objectives.next_token import Loss, next_token
from whorl.tracking.seeds import generator
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import train_loop
from whorl.train.learner.update import MicroBatch, Update, all_adamw

SIZE = 32
COLOURS = {
    "red": (0.9, 0.15, 0.1),
    "green": (0.1, 0.75, 0.2),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.85, 0.1),
}
SHAPES = ("circle", "square")
RELATIONS = ("left of", "above")
OBJECTS = tuple(itertools.product(COLOURS, SHAPES))
SCENES = tuple((r, a, b) for r in RELATIONS for a, b in itertools.permutations(OBJECTS, 2))
CAPTIONS = tuple(f"a {a[0]} {a[1]} {r} a {b[0]} {b[1]}" for r, a, b in SCENES)
PAD, BEGIN, END = 0, 1, 2
WORDS = ("<pad>", "<begin>", "<end>", *sorted({w for c in CAPTIONS for w in c.split()}))
LONGEST = max(len(c.split()) for c in CAPTIONS) + 2
N_HELD_OUT = 20


class Plan(NamedTuple):
    """Steps of each training, and evaluated pictures per caption."""

    clip: int
    text: int
    caption: int
    evaluated: int


FULL = Plan(clip=1500, text=60, caption=1000, evaluated=20)
QUICK = sized(Plan(clip=500, text=40, caption=500, evaluated=4), Plan(clip=4, text=4, caption=4, evaluated=1))


def encode(caption: str) -> list[int]:
    """Ids of begin, words and end, padded to the longest caption."""
    ids = [BEGIN, *(WORDS.index(w) for w in caption.split()), END]
    return ids + [PAD] * (LONGEST - len(ids))


def draw(numbers: Tensor, g: torch.Generator) -> Tensor:
    """One picture of each scene: numbers [N] -> [N, 3, SIZE, SIZE], about -1 to 1."""
    n = len(numbers)

    def between(low: Tensor | float, high: Tensor | float) -> Tensor:
        return (low + (high - low) * torch.rand(n, generator=g))[:, None, None]  # [N, 1, 1]

    scenes = [SCENES[number] for number in numbers.tolist()]
    horizontal = torch.tensor([relation == "left of" for relation, _, _ in scenes])[:, None, None]
    row, column = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    pictures = between(0.3, 0.6)[:, None].expand(n, 3, SIZE, SIZE)
    for place, (low, high) in ((1, (7.0, 9.0)), (2, (22.0, 24.0))):
        colour = torch.tensor([COLOURS[scene[place][0]] for scene in scenes])  # [N, 3]
        is_circle = torch.tensor([scene[place][1] == "circle" for scene in scenes])[:, None, None]
        along, across, radius = between(low, high), between(13.0, 18.0), between(5.5, 7.0)
        dy = row - torch.where(horizontal, across, along)  # [N, SIZE, SIZE]
        dx = column - torch.where(horizontal, along, across)
        square = torch.maximum(dy.abs(), dx.abs()) <= radius
        inside = torch.where(is_circle, dy**2 + dx**2 <= radius**2, square)
        shade = (colour[:, :, None] * between(0.75, 1.1))[..., None]  # [N, 3, 1, 1]
        pictures = torch.where(inside[:, None], shade, pictures)
    return (pictures + 0.05 * torch.randn(pictures.shape, generator=g)) * 2 - 1


def all_captions() -> Tensor:
    """[112, LONGEST] ids."""
    return torch.tensor([encode(c) for c in CAPTIONS])


def batches(numbers: list[int], size: int, g: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Batches of scenes among `numbers`; every picture is new."""
    captions, allowed = all_captions(), torch.tensor(numbers)
    while True:
        chosen = allowed[torch.randint(len(allowed), (size,), generator=g)]
        yield {"images": draw(chosen, g), "numbers": chosen, "ids": captions[chosen]}


def train(
    networks: nn.Module,
    objective: Callable[[MicroBatch], Loss],
    batches: Iterator[dict[str, Tensor]],
    steps: int,
    rate: float,
    prefix: str = "",
) -> dict[str, float]:
    """Train with `Learner`. Returns the metrics of the last step."""
    last: dict[str, float] = {}
    networks.train()
    train_loop(
        Learner(networks, [Update(objective, all_adamw(networks, rate, prefix))]),
        batches,
        lambda part: [[part]],
        last=steps,
        lr_scale=lambda step: min(
            1.0, (step + 1) / min(50, 0.1 * steps), max(0.05, 1.2 * (1 - step / steps))
        ),
        on_step_end=lambda step, metrics, clock: last.update(metrics),
    )
    networks.eval()
    return last


def train_clip(known: list[int], steps: int, seed: int) -> DualEncoder:
    """Train a dual encoder from random weights."""
    vit = ViT(
        SIZE, 8, 3, 32, d_model=64, n_layers=3, n_heads=4, mlp_hidden=128, pooling="mean",
        generator=generator(seed, "image"),
    )  # fmt: skip
    shape = EncoderConfig(
        vocab_size=len(WORDS), d_model=64, n_layers=2, n_heads=4, mlp_hidden=128, max_length=LONGEST
    )
    clip = DualEncoder(vit, Encoder(shape, generator(seed, "text")), generator(seed, "projections"))

    def objective(part: MicroBatch) -> Loss:
        x, y, scale = clip(part["images"], part["ids"], part["ids"] != PAD)
        return info_nce(x, y, scale, part["numbers"])

    train(clip, objective, batches(known, 64, generator(seed, "clip batches")), steps, 1e-3)
    return clip


@torch.no_grad()
def recall(clip: DualEncoder, images: Tensor, numbers: Tensor) -> Tensor:
    """[N] whether the nearest of all captions is the picture's."""
    words = clip.embed_texts(all_captions(), all_captions() != PAD)
    return (clip.embed_images(images) @ words.t()).argmax(dim=1) == numbers


def caption_loss(hidden: Tensor, decoder: Transformer, ids: Tensor) -> Loss:
    """Next-token loss after ids[:, :-1]. hidden: [B, T - 1, d_model]."""
    targets = ids[:, 1:].flatten()
    return next_token(hidden.flatten(0, 1), decoder.head_weight, targets, targets != PAD)


def train_captioner(clip: DualEncoder, known: list[int], plan: Plan, seed: int) -> Captioner:
    """Train a decoder on captions as text, then the cross-attention layers with both models frozen."""
    decoder = Transformer(
        whorl_decoder(
            vocab_size=len(WORDS), d_model=64, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16, mlp_hidden=128,
            ngram_orders=(),
        ),
        generator(seed, "decoder"),
    )  # fmt: skip
    texts = batches(known, 64, generator(seed, "text batches"))
    train(
        decoder, lambda p: caption_loss(decoder(p["ids"][:, :-1]), decoder, p["ids"]), texts, plan.text, 3e-3
    )
    captioner = Captioner(decoder, clip.image, generator=generator(seed, "bridges"))

    def objective(part: MicroBatch) -> Loss:
        hidden = captioner(part["ids"][:, :-1], captioner.encode_images(part["images"]))
        return caption_loss(hidden, decoder, part["ids"])

    pairs = batches(known, 64, generator(seed, "caption batches"))
    train(captioner, objective, pairs, plan.caption, 2e-3, "bridges.")
    return captioner


def captioned(captioner: Captioner, images: Tensor, numbers: Tensor) -> Tensor:
    """[N] whether the whole caption of each picture is correct."""
    found = captioner.generate(images, BEGIN, END, LONGEST)
    captions = [" ".join(WORDS[i] for i in ids) for ids in found]
    return torch.tensor([s == CAPTIONS[n] for s, n in zip(captions, numbers.tolist(), strict=True)])


def run(seed: int, plan: Plan) -> dict[str, float]:
    """One seed: the four shares and the seconds."""
    began = time.perf_counter()
    order = torch.randperm(len(SCENES), generator=generator(seed, "held out")).tolist()
    new, known = order[:N_HELD_OUT], order[N_HELD_OUT:]
    numbers = torch.arange(len(SCENES)).repeat_interleave(plan.evaluated)
    images = draw(numbers, generator(seed, "judged drawings"))
    unseen = torch.isin(numbers, torch.tensor(new))
    clip = train_clip(known, plan.clip, seed)
    right = {"recall": recall(clip, images, numbers)}
    right["caption"] = captioned(train_captioner(clip, known, plan, seed), images, numbers)
    found = {
        f"{name}_{which}": float(hits[rows].float().mean())
        for name, hits in right.items()
        for which, rows in (("trained", ~unseen), ("held_out", unseen))
    }
    return {**found, "seconds": time.perf_counter() - began}


def main() -> None:
    quick = parse(
        __doc__, lambda p: p.add_argument("--quick", action="store_true"), smoke={"quick": True}
    ).quick
    runs = []
    for seed in range(1 if quick else 3):
        runs.append(run(seed, QUICK if quick else FULL))
        print(f"seed {seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in runs[-1].items()), flush=True)
    chance = 1 / len(CAPTIONS)
    for name, what, bar in (
        ("recall_trained", "CLIP recall@1 of 112 captions, held-out pictures of trained captions", 0.95),
        ("recall_held_out", "CLIP recall@1 of 112 captions, pictures of held-out captions", 0.9),
        ("caption_trained", "captioner, whole caption correct, held-out pictures of trained captions", 0.95),
        ("caption_held_out", "captioner, whole caption correct, held-out combinations", 0.75),
    ):
        shares = [r[name] for r in runs]
        mean, bar = statistics.mean(shares), bar / 4 if quick else bar
        claim(
            what, ours=mean, peer=chance, unit="share of pictures", ratio=mean,
            bar=bar, ok=mean >= bar, samples=shares, quick=quick, peer_name="chance", variant=name,
        )  # fmt: skip


if __name__ == "__main__":
    main()
