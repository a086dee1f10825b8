"""Mixtures: shares by temperature and weights, limits on epochs, and the mixture that a token stream reads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.corpus import Corpus, CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.corpus.mixture import CorpusMixture, MixConfig, _pieces, make_mixture, mean_shares, mixture_shares
from whorl.errors import ConfigError, DataError
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.stream import Mixture as StreamMixture
from whorl.tokens.stream import StreamConfig
from whorl.tracking.progress import Progress

NAMES = ["a", "b", "c", "d"]


def shares(
    sizes: list[int], weights: list[list[float]], total: int, epochs: float, **more: float
) -> np.ndarray:
    options = {"temperature": 1.0, "change_until": 1.0, **more}
    return mixture_shares(
        NAMES[: len(sizes)],
        np.array(sizes),
        np.array(weights),
        train_bytes=total,
        max_epochs=epochs,
        **options,
    )


def test_temperature_and_weights_give_known_shares() -> None:
    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert shares([900, 100], ones, 1, 9)[0].tolist() == pytest.approx([0.9, 0.1])
    assert shares([900, 100], ones, 1, 9, temperature=2)[0].tolist() == pytest.approx([0.75, 0.25])
    changed = shares([900, 100], [[1, 1], [1, 9]], 1, 9)
    assert changed.ravel().tolist() == pytest.approx([0.9, 0.1, 0.5, 0.5])
    assert mean_shares(changed, 1.0).tolist() == pytest.approx([0.7, 0.3])
    assert mean_shares(changed, 0.5).tolist() == pytest.approx([0.6, 0.4])


def test_epoch_limit_fills_other_groups_in_proportion() -> None:
    """100 bytes read at most 4 times of 2,000 are a share of 0.2; the others keep their ratio."""
    found = shares([100, 1000, 2000], [[30, 1, 1]] * 2, 2000, 4)
    assert found[0].tolist() == pytest.approx([0.2, 0.8 / 3, 1.6 / 3])
    with pytest.raises(ConfigError, match="more than 4 epochs of a, b"):
        shares([100, 200], [[1, 1]] * 2, 1201, 4)
    with pytest.raises(ConfigError, match="no other group has a weight at that time"):
        shares([100, 5000], [[1, 0], [0, 1]], 5000, 4)
    with pytest.raises(ConfigError, match="all weights"):
        shares([100, 200], [[1, 1], [0, 0]], 100, 4)


@given(
    st.lists(st.integers(1, 10_000), min_size=2, max_size=4), st.data(), st.floats(0.5, 10), st.floats(0.5, 8),
    st.floats(0.05, 1), st.floats(0.05, 0.99),
)  # fmt: skip
def test_shares_respect_limits_and_sum_to_one(
    sizes: list[int], data: st.DataObject, temperature: float, epochs: float, until: float, part: float
) -> None:
    weight = st.floats(0.01, 100)
    weights = [[data.draw(weight) for _ in sizes] for _ in range(2)]
    total = max(1, int(epochs * sum(sizes) * part))
    try:
        found = shares(sizes, weights, total, epochs, temperature=temperature, change_until=until)
    except ConfigError:  # only possible if changing weights leave a time at which no other group can grow
        assert weights[0] != weights[1]
        return
    assert found.sum(axis=1) == pytest.approx([1, 1])
    assert (found >= 0).all()
    read = mean_shares(found, until) * total / np.array(sizes)
    assert (read <= epochs * (1 + 1e-6)).all()
    raw = np.array(weights) * np.array(sizes) ** (1 / temperature)
    free = np.flatnonzero(read < epochs * (1 - 1e-6))
    for row, plain in zip(found, raw, strict=True):  # groups below the limit keep their ratios
        assert row[free] * plain[free].sum() == pytest.approx(plain[free] * row[free].sum())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """60 documents: the first folder's are long, the others short."""
    folder = tmp_path_factory.mktemp("mixing")
    rng = np.random.default_rng(0)
    for i in range(60):
        path = folder / "data" / ("long" if i % 3 else "short") / f"{i:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        letters = ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(900 if i % 3 else 300)]
        path.write_text("\n".join(f"{a} = {b}" for a, b in zip(letters[::2], letters[1::2], strict=True)))
    documents, curated = folder / "documents", folder / "curated"
    for made in (documents, curated):
        made.mkdir()
    ingest(IngestConfig(sources=[str(folder / "data")]), documents, Progress.silent())
    config = CurateConfig(validation_bytes=9000, test_bytes=9000)
    curate(config, document_files(documents), curated, Progress.silent())
    return documents, curated


BY_SIZE = """SELECT row, CASE WHEN n_bytes > 5000 THEN 'long' ELSE 'short' END AS mix_group FROM attributes"""


def make(corpus: tuple[Path, Path], out: Path, **options: object) -> CorpusMixture:
    out.mkdir(exist_ok=True)
    attributes = sorted(corpus[1].glob("attributes-*.parquet"))
    config = MixConfig.model_validate({"groups": BY_SIZE, **options})
    return make_mixture(config, Corpus(*corpus), attributes, out, Progress.silent())


def test_mixture_holds_documents_of_each_group(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    made = make(corpus, tmp_path / "a", weights={"short": 2})
    train = list(Corpus(*corpus).documents("train"))
    for group in made.groups:
        lines = [json.loads(line) for line in (tmp_path / "a" / group.file).read_text().splitlines()]
        expected = [d for d in train if (d.n_bytes > 5000) == (group.name == "long")]
        assert [line["id"] for line in lines] == [d.id for d in expected]
        assert [line["text"] for line in lines] == [d.text for d in expected]
        assert group.bytes == sum(d.n_bytes for d in expected)
    long, short = made.groups
    assert short.share == pytest.approx(2 * short.bytes / (2 * short.bytes + long.bytes))
    assert CorpusMixture.load(tmp_path / "a") == made
    assert make(corpus, tmp_path / "b", weights={"short": 2}).digest == made.digest
    assert make(corpus, tmp_path / "c", weights={"short": 3}).digest != made.digest
    only = make(corpus, tmp_path / "d", weights={"long": 0})
    assert [g.name for g in only.groups] == ["short"]


def test_stream_draws_the_shares_of_the_mixture(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    made = make(corpus, tmp_path, final_weights={"short": 20})
    stream = StreamConfig(tmp_path, made.sources(tmp_path), 32, mixture_warmup_records=2000)
    drawn = StreamMixture(stream)
    for begin, share in ((0, "share"), (2000, "final_share")):
        counts = Counter(
            drawn.source_and_index(i)[0] for i in range(begin, begin + (100 if not begin else 2000))
        )
        expected = [getattr(g, share) for g in made.groups]
        assert counts[1] / counts.total() == pytest.approx(expected[1], abs=0.1 if not begin else 0.04)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"shrot": 1}}, "no group 'shrot'"),
        ({"weights": {"short": -1}}, "weight of 'short' is -1"),
        ({"groups": "SELECT row FROM attributes"}, "mix's query fails"),
        ({"train_bytes": 10**9}, "more than 4 epochs"),
    ],
)
def test_bad_mixtures_are_refused(
    corpus: tuple[Path, Path], tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(corpus, tmp_path, **options)
    with pytest.raises(DataError, match="no document of the split train is in a group"):
        make(corpus, tmp_path, groups="SELECT row, '' AS mix_group FROM attributes")
    with pytest.raises(DataError, match="holds no mixture"):
        CorpusMixture.load(tmp_path / "nothing")


@given(st.integers(0, 30), st.integers(1, 400_000))
@settings(max_examples=20)
def test_long_texts_are_divided_without_loss(lines: int, width: int) -> None:
    text = ("x" * width + "\n") * lines
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 1 << 18 for piece in pieces)


TINY = """
name = "tiny"
[steps.ingest]
sources = ["{data}"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 9000
test_bytes = 9000
[steps.plan]
parents = ["ingest", "curate"]
steps = 6
vocab_size = 300
data = {{ seq_len = 32, batch_size = 4 }}
d_model = 32
n_layers = 1
ngram_buckets = 256
replicas = 1
compile = false
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]
[steps.mix]
parents = ["ingest", "curate"]
groups = "{groups}"
final_weights = {{ short = 3 }}
train_bytes = 20000
[steps.midtrain]
parents = ["pretrain", "mix", "tokens", "tokenizer"]
"""


def test_midtrain_continues_a_model_on_the_mixture(corpus: tuple[Path, Path], tmp_path: Path) -> None:
    store, data = Store(tmp_path / "store"), corpus[0].parent / "data"

    def run(sets: list[str]) -> dict[str, object]:
        text = TINY.format(data=data, groups=BY_SIZE)
        run_recipe(parse_recipe(text, "tiny.toml", sets=sets), store, Progress.silent())
        models = {a.address: a for a in store.artifacts() if a.kind == "model"}
        return {a.manifest.step: a for a in models.values()}

    made = run([])
    before, after = made["pretrain"], made["midtrain"]
    jobs = [json.loads((a.path / "job.json").read_text()) for a in (before, after)]
    assert (jobs[1]["seq_len"], jobs[1]["batch_size"]) == (64, 2)
    assert jobs[1]["optim"]["lr_muon"] == pytest.approx(0.3 * jobs[0]["optim"]["lr_muon"])
    assert jobs[1]["schedule"]["kind"] == "linear"
    assert jobs[1]["stream"]["sources"][1]["final_weight"] > jobs[1]["stream"]["sources"][1]["weight"]
    first, last = (json.loads((a.path / "curve.json").read_text()) for a in (before, after))
    losses = [[r["loss"] for r in curve if "loss" in r] for curve in (first, last)]
    assert losses[1][0] < losses[0][0] - 0.05  # it starts from the trained weights, not from new ones
    with pytest.raises(ConfigError, match="rows of 99999 positions"):
        run(["midtrain.data.seq_len=99999"])
