"""The mixture of a corpus: its groups as files of text, and their shares of training, in `mixture.json`.

A group is a set of documents of one split with the same name in a query over the attributes: by source, by language, or by
buckets of a quality score (`ntile(5) OVER (ORDER BY quality)`). The documents of group k are in `group-kkk.jsonl`, in the
order of the corpus, so a token stream reads each group as a source with a weight (`tokens/stream.py`).

Shares: the share of group i of n_i bytes goes with n_i^(1/T) w_i. T = 1 samples by size; a larger T favors small groups
(Conneau et al. 2020, arXiv:1911.02116, with alpha = 1/T). Weights go linearly from w at the start to w' at the fraction f of
the run, and stay. So the mean share is p f/2 + p' (1 - f/2).

A group is read mean share * D / n_i times in a run of D bytes. Where that is above the limit, the shares of the group are
scaled down to it, and what is freed goes to the other groups in proportion to their shares (water-filling). Up to about 4
epochs, repeated text is nearly worth new text (Muennighoff et al. 2023, arXiv:2305.16264).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whorl.corpus.attributes import query_attributes
from whorl.corpus.blocks import MAX_DOCUMENT_BYTES, Source
from whorl.corpus.reader import Corpus
from whorl.errors import ConfigError, DataError, one_of

if TYPE_CHECKING:
    from whorl.tracking.progress import Progress


def mean_shares(shares: NDArray[np.float64], change_until: float) -> NDArray[np.float64]:
    """Return the mean over the run of shares at its start and end, [2, n_groups]."""
    mean: NDArray[np.float64] = shares[0] * change_until / 2 + shares[1] * (1 - change_until / 2)
    return mean


def mixture_shares(
    names: Sequence[str], sizes: NDArray[np.int64], weights: NDArray[np.float64], *, temperature: float,
    train_bytes: int, max_epochs: float, change_until: float = 1.0,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the shares of each group at the start and at the end of the run, [2, n_groups]; each row sums to 1.

    Args:
        names: [n_groups], for error messages.
        sizes: [n_groups] bytes, above 0.
        weights: [2, n_groups] at the start and at the end, not negative.
        train_bytes: bytes that the run reads, repetitions included.
        max_epochs: the most that a group is read.
        change_until: fraction of the run at which the final weights are reached.

    Raises:
        ConfigError: all weights are 0 at the start or at the end, or the groups have too few bytes for the limit.
    """
    shares = weights * sizes.astype(np.float64) ** (1 / temperature)
    if not (shares.sum(axis=1) > 0).all():
        raise ConfigError(
            "all weights of the mixture are 0", expected="a group with a weight above 0 at any time"
        )
    shares /= shares.sum(axis=1, keepdims=True)
    limit = max_epochs * sizes / train_bytes
    capped = np.zeros(len(sizes), bool)
    while True:
        mean = mean_shares(shares, change_until)
        above = ~capped & (mean > limit * (1 + 1e-9))
        if not above.any():
            return shares
        capped |= above
        shares[:, above] *= limit[above] / mean[above]
        free, rest = 1 - shares[:, capped].sum(axis=1), shares[:, ~capped].sum(axis=1)
        if (rest <= 0).any():
            used = [name for name, full in zip(names, capped, strict=True) if full]
            raise ConfigError(
                f"{train_bytes:,} bytes of training need more than {max_epochs:g} epochs of {', '.join(used)}, and no "
                "other group has a weight at that time",
                expected=f"at most {int(max_epochs * sizes[mean > 0].sum()):,} bytes, from all groups together",
                do="set mix.train_bytes lower, mix.max_epochs higher, or give other groups a weight",
            )
        shares[:, ~capped] *= (free / rest)[:, None]


MIXTURE_FILE = "mixture.json"
GROUPS_BY_SOURCE = "SELECT row, source AS mix_group FROM attributes"


class MixConfig(BaseModel):
    """The groups of a corpus and their shares of training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: str = Field(
        default=GROUPS_BY_SOURCE,
        description="SQL over `attributes`: columns row and mix_group; rows without one are left out",
    )
    split: Literal["train", "validation", "test"] = "train"
    temperature: float = Field(
        default=1.0, gt=0, description="shares go with size ** (1 / temperature) * weight; 1: by size"
    )
    weights: dict[str, float] = Field(
        default={}, description="group -> weight at the start; default 1; 0: left out"
    )
    final_weights: dict[str, float] = Field(
        default={}, description="group -> weight at the end; default: that at the start"
    )
    change_until: float = Field(
        default=1.0, gt=0, le=1, description="fraction of the run at which the final weights are reached"
    )
    train_bytes: int | None = Field(
        default=None, ge=1, description="bytes of text that the run reads; default: those of all groups"
    )
    max_epochs: float = Field(default=4.0, gt=0, description="the most that a group is read in the run")


class MixtureGroup(BaseModel):
    """A group. share, final_share: of the bytes read at the start and at the end. epochs: times that it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str
    digest: str
    documents: int
    bytes: int
    share: float
    final_share: float
    epochs: float


class CorpusMixture(BaseModel):
    """The content of `mixture.json`: groups, bytes read in training, fraction at which the final shares are reached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: list[MixtureGroup]
    train_bytes: int
    change_until: float

    @classmethod
    def load(cls, folder: Path) -> CorpusMixture:
        """Read a mixture. Raises DataError: the file is missing or damaged."""
        try:
            return cls.model_validate_json((folder / MIXTURE_FILE).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder} holds no mixture: {error}", expected="a folder that the step `mix` wrote"
            ) from error

    def sources(self, folder: Path) -> list[Source]:
        """Return the groups as sources of a token stream."""
        return [Source([str(folder / g.file)], g.share, g.final_share) for g in self.groups]

    @property
    def digest(self) -> str:
        """Hash of the groups' texts and shares."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()


def make_mixture(
    config: MixConfig, corpus: Corpus, attributes: Sequence[Path], out: Path, progress: Progress
) -> CorpusMixture:
    """Write the groups' texts and `mixture.json` into `out`.

    Args:
        attributes: files of the corpus, as `curate` writes them.

    Raises:
        ConfigError: the query is invalid, a weight is negative or of an unknown group, or shares are impossible.
        DataError: no document of the split is in a group.
    """
    import pyarrow.parquet as pq

    rows = corpus.rows(config.split)
    columns = pq.read_schema(attributes[0]).names
    names = query_attributes(config.groups, "mix_group", attributes, columns, corpus.n_rows, step="mix")
    of_row = dict(zip(rows.tolist(), names[rows].tolist(), strict=True))
    left_out = {"", "not_selected"} | {
        n for n, w in config.weights.items() if not w and not config.final_weights.get(n)
    }
    found = sorted(set(of_row.values()) - left_out)
    if not found:
        raise DataError(f"no document of the split {config.split} is in a group", do="check mix.groups")
    for name, weight in [*config.weights.items(), *config.final_weights.items()]:
        if weight < 0 or (name not in found and name not in left_out):
            raise ConfigError(
                f"the mixture has no group {name!r}"
                if weight >= 0
                else f"the weight of {name!r} is {weight:g}",
                expected=one_of(name, found) if weight >= 0 else "0 or more",
            )
    counts, sizes, digests = _write_groups(config.split, corpus, of_row, found, out, progress)
    total = config.train_bytes or int(sizes.sum())
    first = [config.weights.get(name, 1.0) for name in found]
    last = [config.final_weights.get(name, w) for name, w in zip(found, first, strict=True)]
    shares = mixture_shares(
        found, sizes, np.array([first, last]), temperature=config.temperature, train_bytes=total,
        max_epochs=config.max_epochs, change_until=config.change_until,
    )  # fmt: skip
    epochs = mean_shares(shares, config.change_until) * total / sizes
    groups = [
        MixtureGroup(
            name=name, file=_group_file(i), digest=digests[i], documents=counts[i], bytes=int(sizes[i]),
            share=float(shares[0, i]), final_share=float(shares[1, i]), epochs=float(epochs[i]),
        )
        for i, name in enumerate(found)
    ]  # fmt: skip
    mixture = CorpusMixture(groups=groups, train_bytes=total, change_until=config.change_until)
    (out / MIXTURE_FILE).write_text(mixture.model_dump_json(indent=1) + "\n")
    return mixture


def _group_file(number: int) -> str:
    return f"group-{number:03d}.jsonl"


def _write_groups(
    split: str, corpus: Corpus, of_row: dict[int, str], names: Sequence[str], out: Path, progress: Progress
) -> tuple[list[int], Any, list[str]]:
    """Write the documents of each group; return its documents, bytes and hash of the file."""
    number = {name: i for i, name in enumerate(names)}
    counts, sizes = [0] * len(names), np.zeros(len(names), np.int64)
    hashes = [hashlib.blake2b(digest_size=16) for _ in names]
    files = [(out / _group_file(i)).open("wb") for i in range(len(names))]
    try:
        with progress.task("Mixing", total=len(of_row), unit="documents") as task:
            for (_, name), document in zip(of_row.items(), corpus.documents(split), strict=True):
                task.advance(1)
                if (i := number.get(name)) is None:
                    continue
                counts[i] += 1
                for piece in _pieces(document.text):
                    line = orjson.dumps({"id": document.id, "text": piece}) + b"\n"
                    files[i].write(line)
                    hashes[i].update(line)
                    sizes[i] += len(piece.encode())
    finally:
        for file in files:
            file.close()
    return counts, sizes, [h.hexdigest() for h in hashes]


def _pieces(text: str) -> Iterator[str]:
    """Yield a text, or pieces of one that is longer than a token stream reads, cut at line ends where possible."""
    limit = MAX_DOCUMENT_BYTES // 4  # characters: at most 4 bytes each
    while len(text) > limit:
        cut = text.rfind("\n", 0, limit) + 1 or limit
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text
