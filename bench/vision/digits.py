"""Accuracy of `whorl run classify-digits` on held-out digits, with each network, against classical classifiers.

    python -m pip install scikit-learn
    python bench/vision/digits.py                # 5 seeds of each network: minutes
    python bench/vision/digits.py --seeds 1

A seed decides the split (a fifth of the 1,797 images is held out), the weights and the order. The peers are those of
scikit-learn, on the same split: the number of neighbours, the regularization and the kernel's width are chosen by 5-fold
cross-validation on the training images. The settings of the networks were chosen on another split.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse, sized
from bench.vision._recipes import run_seed

from whorl.vision.image_set import ImageSet

NETWORKS = {
    "resnet": [],
    "vit": ['classifier.network={kind="vit"}', "classifier.steps=2200", "classifier.lr=2e-3"],
    "mixer": ['classifier.network={kind="mixer"}', "classifier.steps=1320"],
}
SHORT = {  # peer -> part of the record's id
    "logistic regression": "logistic",
    "k-nearest neighbours": "neighbours",
    "support vector machine": "svm",
}


def peers(images: ImageSet) -> dict[str, float]:
    """Held-out accuracy of scikit-learn's classifiers."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    train, test = images.split("train"), images.split("test")
    x, held = (split.images.reshape(len(split), -1) / 255 for split in (train, test))
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    searches = {
        "logistic regression": GridSearchCV(logistic, {"logisticregression__C": [0.01, 0.03, 0.1, 0.3, 1.0]}),
        "k-nearest neighbours": GridSearchCV(KNeighborsClassifier(), {"n_neighbors": [1, 2, 3, 4, 5, 7]}),
        "support vector machine": GridSearchCV(SVC(), {"C": [1, 10], "gamma": [0.03, 0.1, 0.3, 1.0]}),
    }
    return {
        name: float(search.fit(x, train.labels).score(held, test.labels)) for name, search in searches.items()
    }


def main() -> None:
    a = parse(
        __doc__,
        lambda p: (
            p.add_argument("--seeds", type=int, default=5),
            p.add_argument("--only", choices=list(NETWORKS)),
            p.add_argument("--quick", action="store_true", help="one seed of the first network"),
        ),
        smoke={"seeds": 1},
    )
    if not find_spec("sklearn"):
        print("skipped: needs scikit-learn (pip install scikit-learn)")
        sys.exit(77)
    if a.quick:
        a.seeds, a.only = 1, a.only or next(iter(NETWORKS))
    chosen = {name: sets for name, sets in NETWORKS.items() if a.only in (None, name)}
    found: dict[str, list[float]] = {}
    for seed in range(a.seeds):
        for name, sets in chosen.items():
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                small = sized([], ["classifier.steps=5"])
                made = run_seed("classify-digits", seed, Path(folder), [*sets, *small], "classifier")
                (accuracy,) = made["classifier"].summary["eval"]["after"].values()
                found.setdefault(name, []).append(accuracy)
                print(
                    f"seed {seed}, {name}: {accuracy:.2%} in {time.perf_counter() - began:.0f} s", flush=True
                )
                if name == next(iter(chosen)):
                    for peer, score in peers(ImageSet(made["images"].path)).items():
                        found.setdefault(peer, []).append(score)
                        print(f"seed {seed}, {peer}: {score:.2%}", flush=True)
    for name in chosen:
        ours = statistics.mean(found[name])
        for peer, short in SHORT.items():
            theirs = statistics.mean(found[peer])
            ratio = (1 - theirs) / max(1 - ours, 1e-9)  # of the errors
            claim(
                f"digits, {name}: accuracy on held-out images, mean of {a.seeds} splits; ratio of the errors",
                ours=ours, peer=theirs, unit="accuracy", ratio=ratio, bar=1.0, ok=ratio >= 1.0,
                samples=found[name], quick=a.seeds < 3, peer_name=peer, variant=f"{name}-{short}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
