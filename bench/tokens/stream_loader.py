"""From raw documents to batches: our workers against a PyTorch DataLoader with 2 workers.

    python bench/tokens/stream_loader.py --store .whorl

The data are the training split of the store's quickstart, written as JSONL, and its vocabulary. The peer is an iterable
dataset that parses lines, with Hugging Face `tokenizers` and packing in the collate function. Ours is `StreamBatches`
with 2 workers. Both give rows of 256 tokens, 8 per batch. A second claim compares with the bare encoder on the same
texts in 2 processes. A third compares the loader's slots from ready shards with a map-style dataset over the same token
file.

The script also prints how random the order is. It reports the distance between a block's place in the order and its
place on disk, and the distance in the order between documents that are neighbours on disk. The documents of one block
stay in one record, shuffled with those of the record's other blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.plan._tiny_store import open_store

from whorl.corpus import Corpus
from whorl.corpus.blocks import Source
from whorl.data.quarantine import Quarantine
from whorl.tokens.loader import open_batches
from whorl.tokens.stream import StreamBatches, StreamConfig, StreamProducer, blocks_per_record
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import numpy_rng

LENGTH, ROWS = sized(256, 64), 8


class Lines(torch.utils.data.IterableDataset[str]):
    """Texts of a JSONL file; each worker reads its share of the lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        worker = torch.utils.data.get_worker_info()
        with self.path.open() as lines:
            for number, line in enumerate(lines):
                if number % worker.num_workers == worker.id:
                    yield json.loads(line)["text"]


class Collate:
    """Concatenates the texts of a batch and cuts them into rows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, texts: list[str]) -> torch.Tensor:
        if not hasattr(self, "tokenizer"):
            from tokenizers import Tokenizer as PeerTokenizer

            self.tokenizer = PeerTokenizer.from_file(str(self.path))
        ids = [i for e in self.tokenizer.encode_batch(texts) for i in (*e.ids, 0)]
        n = len(ids) // LENGTH
        return torch.tensor(ids[: n * LENGTH]).view(n, LENGTH)


def peer_tokens_per_second(jsonl: Path, tokenizer: Path, seconds: float) -> float:
    """Tokens per second of the DataLoader."""
    loader = torch.utils.data.DataLoader(
        Lines(jsonl), batch_size=8, num_workers=2, collate_fn=Collate(tokenizer), prefetch_factor=4
    )
    tokens, began = 0, None
    while True:
        for batch in loader:
            if began is None:
                began = time.perf_counter()  # the workers have started
                continue
            tokens += batch.numel()
            if time.perf_counter() - began > seconds:
                return tokens / (time.perf_counter() - began)


def our_tokens_per_second(config: StreamConfig, seconds: float) -> float:
    """Tokens per second of our stream."""
    with StreamBatches(config, batch_size=ROWS, workers=2) as batches:
        for _ in range(sized(3 * 64, 4)):  # batches that the workers prefetched during start-up
            next(batches)
        before, began = batches.tokens_consumed, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(batches)
        return (batches.tokens_consumed - before) / (time.perf_counter() - began)


def encode(folder: Path, texts: list[str]) -> tuple[int, float]:
    tokenizer = Tokenizer.load(folder)
    began = time.perf_counter()
    return sum(len(tokenizer.encode_document(t)) for t in texts), time.perf_counter() - began


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A map-style dataset over a memory-mapped token file, as in many training scripts."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return (len(self.ids) - 1) // LENGTH

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.from_numpy(np.asarray(self.ids[i * LENGTH : (i + 1) * LENGTH + 1]).astype(np.int64))
        return row[:-1], row[1:]


def shards(tokens: Path, seconds: float) -> tuple[float, float]:
    """Tokens per second from ready shards: (ours, a map-style dataset)."""
    with open_batches(tokens, "train", seq_len=LENGTH, batch_size=ROWS) as batches:
        for _ in range(10):
            next(batches)
        n, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(batches).tensors()
            n += 1
        ours = n * ROWS * LENGTH / (time.perf_counter() - began)
    rows = Rows(np.memmap(next(iter(sorted(tokens.glob("train-*.bin")))), np.uint16, "r"))
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, shuffle=True, num_workers=2)
    n, began = 0, None
    for _ in loader:
        began = began or time.perf_counter()
        n += 1
        if time.perf_counter() - began > seconds:
            break
    return ours, n * ROWS * LENGTH / (time.perf_counter() - began)


def randomness(config: StreamConfig) -> dict[str, float]:
    """Measure how far one epoch's order is from the order on disk.

    Returns:
        blocks: mean distance between a block's place in the order and its place on disk, relative to a full shuffle.
        neighbours: mean distance, in the order, of documents that are neighbours on disk.
        full_shuffle: the value of `neighbours` for a full shuffle, a third of the documents.
    """
    producer = StreamProducer(config)
    producer.blocks_in_record(0)
    files = producer._state["files"][0]
    n, per_record = len(files.blocks), blocks_per_record(files, config.shuffle_bytes)
    blocks = [b for record in range(-(-n // per_record)) for b in producer.blocks_in_record(record)[1]][:n]
    counts = np.array([sum(1 for _ in files.texts(b, Quarantine())) for b in range(n)])
    begins = np.cumsum(counts) - counts
    order: list[int] = []
    for record in range(-(-n // per_record)):
        documents = [
            int(begins[b]) + i for b in blocks[record * per_record :][:per_record] for i in range(counts[b])
        ]
        shuffled = numpy_rng(config.seed, "documents", record).permutation(len(documents))
        order += [documents[i] for i in shuffled]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return {
        "blocks": float(np.abs(np.array(blocks) - np.arange(n)).mean() / (n / 3)),
        "neighbours": float(np.abs(np.diff(place)).mean()),
        "full_shuffle": len(order) / 3,
    }


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", default=None)
        parser.add_argument("--seconds", type=float, default=6.0)
        parser.add_argument("--rounds", type=int, default=3)

    a = parse(__doc__, arguments, smoke={"seconds": 0.1}, quick={"seconds": 2.0, "rounds": 1})
    torch.set_num_threads(1)
    store = open_store(a.store)
    corpus = Corpus(store.open("quickstart/ingest").path, store.open("quickstart/curate").path)
    tokens, vocabulary = store.open("quickstart/tokens").path, store.open("quickstart/tokenizer").path
    texts = [d.text for d in corpus.documents("train")]
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "train.jsonl"
        jsonl.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        config = StreamConfig(vocabulary, [Source([str(jsonl)])], LENGTH)
        pairs = []
        for _ in range(a.rounds):
            ours = our_tokens_per_second(config, a.seconds)
            peer = peer_tokens_per_second(jsonl, vocabulary / "tokenizer.json", a.seconds)
            pairs.append((ours, peer))
            print(
                f"from raw text: ours {pairs[-1][0]:,.0f} tokens/s, DataLoader {pairs[-1][1]:,.0f}",
                flush=True,
            )
        ours, peer = sorted(pairs, key=lambda p: p[0] / p[1])[a.rounds // 2]
        claim(
            "raw text to batches", ours=round(ours), peer=round(peer),
            peer_name="torch DataLoader, 2 workers", unit="tokens/s",
            ratio=ours / peer, bar=3.0, ok=ours / peer >= 3, quick=a.quick, samples=[[round(x) for x in p] for p in pairs],
        )  # fmt: skip
        with ProcessPoolExecutor(2) as pool:
            list(pool.map(encode, [vocabulary] * 2, [texts[:20]] * 2))
            made = list(pool.map(encode, [vocabulary] * 2, [texts[0::2], texts[1::2]]))
        bare = sum(n for n, _ in made) / max(s for _, s in made)
        claim(
            "raw text to batches, against the encoder alone", ours=round(ours), peer=round(bare),
            peer_name="encoder in 2 processes", variant="encoder",
            unit="tokens/s", ratio=ours / bare, bar=0.8, ok=ours / bare >= 0.8, quick=a.quick,
        )  # fmt: skip
        for size in (1 << 17, 1 << 14):
            found = randomness(replace(config, block_bytes=size))
            apart, full = found["neighbours"], found["full_shuffle"]
            print(
                f"blocks of {size >> 10} kB, records of 512 kB: the mean distance of a block from its place on disk is "
                f"{found['blocks']:.2f} of a full shuffle's. Neighbours on disk are {apart:.0f} documents apart "
                f"(full shuffle: {full:.0f})"
            )
    both = [shards(tokens, a.seconds / 2) for _ in range(a.rounds)]
    ours, peer = sorted(both, key=lambda p: p[0] / p[1])[a.rounds // 2]
    claim(
        "ready shards to batches", ours=round(ours), peer=round(peer),
        peer_name="map-style dataset, 2 workers", variant="shards",
        unit="tokens/s", ratio=ours / peer, bar=10.0, ok=ours / peer >= 10, quick=a.quick,
        samples=[[round(x) for x in p] for p in both],
    )  # fmt: skip


if __name__ == "__main__":
    main()
