"""Streams of raw text: equal rows for any workers and ranks, resume at any row, exact epochs and mixtures."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whorl.errors import CheckpointError, ConfigError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.stream import Mixture, Source, StreamBatches, StreamConfig
from whorl.tokens.tokenizer import Tokenizer


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    rng = np.random.default_rng(0)
    for name in "ab":
        texts = [f"{name}{n} " + "word " * int(rng.integers(1, 60)) for n in range(120)]
        write(folder / f"{name}.jsonl", texts)
    Tokenizer.train(["word " * 50, "a1 b2"], 300).save(folder)
    return folder


def config(folder: Path, names: str = "ab", **change: Any) -> StreamConfig:
    sources = [Source([str(folder / f"{n}.jsonl")]) for n in names]
    base = {"tokenizer": folder, "sources": sources, "seq_len": 32, "block_bytes": 900, "shuffle_bytes": 2700}
    return StreamConfig(**{**base, **change})


def stream(settings: StreamConfig, **options: Any) -> StreamBatches:
    """A stream without workers, of batches of 8 rows unless `min_targets` is given."""
    size = {} if "min_targets" in options else {"batch_size": 8}
    return StreamBatches(settings, **{"workers": 0, **size, **options})


def read(batches: StreamBatches, n: int) -> list[dict[str, torch.Tensor]]:
    with batches:
        # Copied, because a batch may be a view that the next one overwrites.
        return [{name: t.clone() for name, t in next(batches).items()} for _ in range(n)]


def same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(torch.equal(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in x)


def test_rows_do_not_depend_on_workers(folder: Path) -> None:
    line = read(stream(config(folder)), 25)
    for workers in (1, 3):
        assert same(line, read(stream(config(folder), workers=workers), 25))
    assert not same(line, read(stream(config(folder, seed=1)), 25))


@pytest.mark.parametrize("size", [{}, {"min_targets": 150}])
def test_stream_resumes_with_other_workers(folder: Path, size: dict[str, int]) -> None:
    whole = read(stream(config(folder), **size), 30)
    for stop, before, after in ((1, 0, 0), (7, 2, 1), (19, 0, 0)):
        first = stream(config(folder), workers=before, **size)
        read(first, stop)
        state = json.loads(json.dumps(first.state))
        rest = stream(config(folder), workers=after, state=state, **size)
        assert same(whole[stop:], read(rest, 30 - stop))
        assert rest.tokens_consumed == sum(int(b["loss_mask"].sum()) for b in whole)


def test_ranks_share_each_batch(folder: Path) -> None:
    """After 2, 4 and 1 ranks the rows are those of one; each record is tokenized by one rank."""
    plain = stream(config(folder))
    whole, state, at, records = read(plain, 18), None, 0, 0
    for world in (2, 4, 1):
        pipes: list[list[Any]] = [[None] * world for _ in range(world)]
        for low, high in itertools.combinations(range(world), 2):
            pipes[low][high], pipes[high][low] = Pipe()
        groups = [ProcessGroup(rank, world, pipes[rank]) for rank in range(world)]
        readers = [stream(config(folder), group=group, state=state) for group in groups]
        with ThreadPoolExecutor(world) as threads:
            found = list(threads.map(lambda reader: read(reader, 6), readers))
        for rank, own in enumerate(found):
            for part, batch in zip(own, whole[at : at + 6], strict=True):
                assert all(torch.equal(t, batch[name][rank::world]) for name, t in part.items())
        (state,) = {json.dumps(reader.state) for reader in readers}
        state, at = json.loads(state), at + 6
        records += sum(reader.reader.stats.records for reader in readers)
    assert state == plain.state
    assert (
        plain.reader.stats.records <= records <= plain.reader.stats.records + 2
    )  # the first of a start again


def test_epoch_has_every_document_once(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    texts = [json.loads(line)["text"] for line in (folder / "a.jsonl").read_text().splitlines()]
    settings = config(folder, "a", shuffle_bytes=1)
    n_blocks = -(-(folder / "a.jsonl").stat().st_size // 900)
    found: list[str] = []
    with stream(settings, batch_size=1) as reader:
        while reader.state["record"] < n_blocks:
            row = next(reader)
            for segment in range(1, int(row["segment_ids"].max()) + 1):
                selected = (row["segment_ids"] == segment) & row["loss_mask"]
                text = tokenizer.decode(row["targets"][selected].tolist()).decode()
                found.append(text.removesuffix("<|eos|>"))
    # Documents longer than a row are cut into chunks, so compare all text.
    assert sorted("".join(found)) == sorted("".join(texts))
    starts = {text.split()[0] for text in found if text.startswith("a")}
    assert starts == {text.split()[0] for text in texts}


def test_min_targets_is_met_by_fewest_rows(folder: Path) -> None:
    for batch in read(stream(config(folder), min_targets=200), 20):
        per_row = batch["loss_mask"].sum(dim=1)
        assert int(per_row.sum()) >= 200 > int(per_row[:-1].sum())


def test_mixture_follows_moving_weights(folder: Path) -> None:
    a, b = ([str(folder / f"{n}.jsonl")] for n in "ab")
    fixed = Mixture(StreamConfig(folder, [Source(a, 3.0), Source(b, 1.0)], 32))
    share = np.mean([fixed.source_and_index(s)[0] == 0 for s in range(6000)])
    assert abs(share - 0.75) < 0.02
    ends = [Source(a, 1.0, 0.0), Source(b, 0.0, 1.0)]
    moving = Mixture(StreamConfig(folder, ends, 32, mixture_warmup_records=8000))
    sources = np.array([moving.source_and_index(s)[0] for s in range(9000)])
    assert sources[:800].mean() < 0.1 and abs(sources[3600:4400].mean() - 0.5) < 0.06 and sources[8000:].all()
    # Within a source, no record is skipped or repeated, for any start.
    nth = [moving.source_and_index(s) for s in range(9000)]
    for source in (0, 1):
        assert [n for s, n in nth if s == source] == list(range(sum(s == source for s, _ in nth)))
    assert Mixture(moving.config).source_and_index(8765) == nth[8765]


def test_resume_rejects_changed_data(folder: Path, tmp_path: Path) -> None:
    path, settings = tmp_path / "a.jsonl", config(tmp_path, "a", tokenizer=folder)
    path.write_bytes((folder / "a.jsonl").read_bytes())
    reader = stream(settings)
    read(reader, 1)
    path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
    with pytest.raises(CheckpointError, match="the data or the settings of the stream changed"):
        stream(settings, state=reader.state)


def test_unreadable_records_are_counted(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    lines[5], lines[60] = "{broken\n", '{"no": "text"}\n'
    (tmp_path / "a.jsonl").write_text("".join(lines))
    reader = stream(config(tmp_path, "a", tokenizer=folder, shuffle_bytes=180_000))
    read(reader, 1)
    assert reader.n_rejected >= 2


def test_stream_rejects_impossible_settings(folder: Path) -> None:
    a = [str(folder / "a.jsonl")]
    for sources in ([], [Source(a, -1.0)], [Source(a, 1.0, 0.0)]):
        with pytest.raises(ConfigError, match="mixture"):
            StreamConfig(folder, sources, 32)
    with pytest.raises(ConfigError, match="one of batch_size and min_targets"):
        StreamBatches(config(folder), batch_size=4, min_targets=100)
