"""A store with a tiny quickstart (plan, byte tokenizer, tokens, random decoder), made in a second, for `--smoke`."""

from __future__ import annotations

import atexit
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bench._run import quickstart_store, smoke

from whorl.corpus.documents import Document, document_id
from whorl.models import Transformer, save_model, whorl_decoder
from whorl.store import Artifact, Build, Store
from whorl.tokens.shards import write_shards
from whorl.tokens.tokenizer import Tokenizer

SEQ_LEN = 32


def open_store(path: str | Path | None) -> Store:
    """The quickstart's store (`quickstart_store`); under `--smoke` a new one with a tiny quickstart, removed at exit."""
    if not smoke():
        return quickstart_store(path)
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    store, tokenizer = Store(top / "store"), Tokenizer([bytes([i]) for i in range(256)])

    def add(
        kind: str, name: str, write: Callable[[Path], object], parents: Mapping[str, Artifact]
    ) -> Artifact:
        full = f"quickstart/{name}"
        with Build(store, kind=kind, name=full, parents=parents, config={}, version=1) as build:
            write(build.path)
        return store.open(full)

    def plan(folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps({"job": {"seq_len": SEQ_LEN}}))

    add("plan", "plan", plan, {})
    add("tokenizer", "tokenizer", tokenizer.save, {})
    tokens = add("tokens", "tokens", lambda folder: write_splits(tokenizer, folder), {})
    shape = whorl_decoder(
        vocab_size=tokenizer.vocab_size, d_model=128, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=32, mlp_hidden=192,
        ngram_buckets=64, trained_length=SEQ_LEN,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = Transformer(shape, generator)
    with torch.no_grad():  # parameters that start at zero would make every variant of the model equal
        for p in model.parameters():
            if not p.any():
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
    add("model", "pretrain", lambda folder: save_model(model, folder), {"tokens": tokens})
    return store


def write_splits(tokenizer: Tokenizer, folder: Path) -> None:
    """Write shards of parts of standard library files: 24 for training, 4 for validation, 4 for testing."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:32]
    texts = [file.read_text(encoding="utf-8", errors="replace")[:600] for file in files]
    documents = [
        Document(
            document_id("stdlib", str(n), 0), "stdlib", f"{n}.py", None, 0, text, len(text.encode()), None
        )
        for n, text in enumerate(texts)
    ]
    for split, part in (("train", slice(8, 32)), ("validation", slice(0, 4)), ("test", slice(4, 8))):
        write_shards(documents[part], tokenizer, folder, split)
