"""Tokens: from documents to fixed-length rows of token ids that a trainer reads in place.

`pretokens` splits and counts text, `bpe` learns merges from the counts, and `tokenizer` encodes with them. `shards` stores
a corpus as ids on disk with the provenance of every token. `packing` puts documents into rows, and `loader` fills slots
with batches of rows. `stream` does the same from raw text. `chat` applies chat templates.
"""
