"""Retrieval and captions of `whorl run caption-scenes` on drawn scenes of two objects, over several seeds.

    python bench/vision/scenes.py                # 3 seeds, minutes each
    python bench/vision/scenes.py --seeds 1
    python bench/vision/scenes.py --quick        # one seed, few steps

112 captions differ in colours, shapes, order and relation; 20 of them occur in no training image. Two figures are measured,
on new images of trained captions and on images of the 20 new captions. One is the recall@1 of CLIP among all 112 captions,
the other the fraction of the captioner's captions that are right in every character. A seed decides images, held-out
captions, weights and order. Chance is 1 of 112.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse, sized
from bench.vision._recipes import run_seed

SMALL = [
    "images.train_scenes=128", "images.test_scenes=32", "clip.steps=3", "sft.data.epochs=1", "captioner.steps=3",
]  # fmt: skip
QUICK = [
    "images.train_scenes=1600", "images.test_scenes=200", "clip.steps=150", "sft.data.epochs=3",
    "captioner.steps=70",
]  # fmt: skip
# (step, its figure) -> (name, bar)
BARS = {
    ("clip", "held-out images"): ("recall", 0.95),
    ("clip", "images of new captions"): ("recall_new", 0.8),
    ("captioner", "held-out images"): ("caption", 0.9),
    ("captioner", "images of new captions"): ("caption_new", 0.6),
}


def main() -> None:
    a = parse(
        __doc__,
        lambda p: (
            p.add_argument("--seeds", type=int, default=3),
            p.add_argument("--quick", action="store_true", help="one seed, few steps"),
        ),
        smoke={"seeds": 1},
    )
    a.seeds = 1 if a.quick else a.seeds
    sets = sized(QUICK if a.quick else [], SMALL)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(a.seeds):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            made = run_seed("caption-scenes", seed, Path(folder), sets, "captioner")
        for step in ("clip", "captioner"):
            for name, value in made[step].summary["eval"]["after"].items():
                found.setdefault((step, name.split(", ")[-1]), []).append(value)
        shown = ", ".join(f"{BARS[key][0]} {values[-1]:.3f}" for key, values in found.items())
        print(f"seed {seed}: {shown}; {time.perf_counter() - began:.0f} s", flush=True)
    what = {"clip": "CLIP, recall@1 of 112 captions", "captioner": "captioner, caption exactly right"}
    for (step, where), (variant, bar) in BARS.items():
        values = found[step, where]
        mean = statistics.mean(values)
        claim(
            f"{what[step]}, {where}, mean of {len(values)} seeds", ours=mean, peer=1 / 112, unit="share of images",
            ratio=mean, bar=bar, ok=mean >= bar, samples=values, quick=a.seeds < 3, peer_name="chance", variant=variant,
        )  # fmt: skip


if __name__ == "__main__":
    main()
