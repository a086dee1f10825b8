"""Bits per byte of a quickstart model with context longer than in training, with and without YaRN scaling.

    python bench/evals/long_context.py --store .whorl             # after `make quickstart`; about two minutes
    python bench/evals/long_context.py --store .whorl --quick     # an eighth of the files

The decoder trains on rows of `trained_length` tokens. It is scored in windows of 2 and 4 times as many tokens, with
unchanged rotary frequencies and with the scaled ones of `models/transformer.py`. Bits per byte are of the test split, each
file separately. The factor 4, the ramp and the gain were chosen on a sixth of the validation split.

Bar: at 4 times the trained length, at least 2 % fewer bits per byte than at 2 times with unchanged frequencies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.models._smoke_store import open_store

from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.machine.device_probe import probe
from whorl.models import Transformer, load_model
from whorl.models.transformer_block import YARN_FACTOR
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer


def main() -> None:
    a = parse(
        __doc__,
        lambda p: (p.add_argument("--store", default=None), p.add_argument("--quick", action="store_true")),
    )
    store, machine = open_store(a.store), probe()
    machine.apply()
    model = load_model(store.open("quickstart/pretrain").path, machine.torch_dtype, machine.device).eval()
    assert isinstance(model, Transformer)
    folder = store.open("quickstart/tokens").path
    documents = list(TokenSet(folder).split("test").iter_documents())[:: 8 if a.quick else 1]
    tokenizer = Tokenizer.load(store.open("quickstart/tokenizer").path)
    n_bytes = sum(len(tokenizer.decode([int(i) for i in ids[1:-1]])) for ids in documents)
    trained = json.loads(store.open("quickstart/plan").file("plan.json").read_text())["job"]["seq_len"]
    found: dict[str, float] = {}
    for window in (2 * trained, int(YARN_FACTOR * trained)):
        for kind, length in (("unchanged", None), ("scaled", trained)):
            config = model.config.model_copy(update={"trained_length": length})
            reader = Transformer(config, dtype=model.dtype).to(machine.device).eval()
            reader.load_state_dict(model.state_dict())
            name = f"{window} tokens, frequencies {kind}"
            found[name] = bits_per_byte(sum(document_nats(reader, documents, window)), n_bytes)
            print(f"{name}: {found[name]:.4f}", flush=True)
    before, _, _, now = found.values()
    claim(
        f"context of {int(YARN_FACTOR * trained)} tokens with YaRN after training on {trained}",
        ours=now, peer=before, unit="bits per byte", ratio=now / before, bar=0.98, ok=now <= 0.98 * before,
        quick=a.quick, peer_name=f"{2 * trained} tokens, unchanged frequencies",
        samples=[{"way": n, "bits_per_byte": v} for n, v in found.items()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
