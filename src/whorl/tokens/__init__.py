"""Tokens: from documents to fixed rows of token ids that a trainer reads in place.

The way through the room: `pretokens` cuts text into pieces that no token may cross and counts them, `bpe`
learns merges from the counts, `tokenizer` encodes with them, `shards` keeps whole corpora of ids on disk
with a way back to every document, `packing` lays documents into rows, and `loader` fills slots with batches
of rows.
"""
