"""Tokens: from documents to fixed-length rows of token ids that a trainer reads in place.

`pretokens` splits and counts text, `bpe` learns merges from the counts, and `tokenizer` encodes with them. `shards` stores
a corpus as ids on disk with the provenance of every token. `packing` puts documents into rows, and `loader` fills slots
with batches of rows. `stream` does the same from raw text. `chat` applies chat templates.

The names below are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl._lazy_exports import lazy_exports

if TYPE_CHECKING:
    from whorl.tokens.bpe import train_merges
    from whorl.tokens.chat import ChatTemplate, load_chat_template
    from whorl.tokens.hf_tokenizer import HFTokenizer, load_tokenizer
    from whorl.tokens.loader import TokenBatch, open_batches
    from whorl.tokens.packing import PackedRows, pack, random_windows
    from whorl.tokens.pretokens import count_pretokens, split_pretokens
    from whorl.tokens.shards import TokensConfig, TokenSet, TokenSplit, write_shards
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tokens.token_ids import write_id_shards
    from whorl.tokens.tokenizer import Tokenizer

_MODULES = {
    "bpe": ("train_merges",),
    "chat": ("ChatTemplate", "load_chat_template"),
    "token_encoder": ("TokenEncoder",),
    "hf_tokenizer": ("HFTokenizer", "load_tokenizer"),
    "loader": ("TokenBatch", "open_batches"),
    "packing": ("PackedRows", "pack", "random_windows"),
    "pretokens": ("count_pretokens", "split_pretokens"),
    "shards": ("TokenSet", "TokenSplit", "TokensConfig", "write_shards"),
    "token_ids": ("write_id_shards",),
    "tokenizer": ("Tokenizer",),
}
__all__ = [
    "ChatTemplate",
    "HFTokenizer",
    "PackedRows",
    "TokenBatch",
    "TokenEncoder",
    "TokenSet",
    "TokenSplit",
    "Tokenizer",
    "TokensConfig",
    "count_pretokens",
    "load_chat_template",
    "load_tokenizer",
    "open_batches",
    "pack",
    "random_windows",
    "split_pretokens",
    "train_merges",
    "write_id_shards",
    "write_shards",
]
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
