"""Estimate of a replica's prefix cache from the prompts that were sent to it: chained block hashes with LRU eviction.

A prompt is cut into blocks, and the hash of a block covers all blocks before it: h(i) = hash(h(i-1), block i). One hash thus
identifies a whole prefix, and a set of hashes is a radix tree without nodes. The longest cached prefix is the number of
leading hashes in the set. (Tree: Zheng et al. 2023, "SGLang", arXiv 2312.07104. Chained hashes: Kwon et al. 2023,
"PagedAttention", arXiv 2309.06180, section 4.4.)

The router hashes text, because tokenizing each prompt twice would cost more than the estimate saves. A block is
`BLOCK_BYTES` of text, about one page of tokens, or `BLOCK_IDS` ids. The text consists of the prompt's fields in order
(`prompt_and_seed`), so sampling parameters do not change it.

The subtle point is the LRU order. A chain is touched from its end to its start, so a prefix is always newer than its
continuations. The oldest entry is therefore a leaf, and an eviction never leaves a chain without its start.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

BlockHashes = tuple[int, ...]

BLOCK_BYTES = 128  # bytes of text per block, about 32 tokens
BLOCK_IDS = 32
MAX_BLOCKS = 2048  # per prompt; later blocks are ignored


def block_hashes(prompt: bytes | Sequence[int], seed: bytes = b"") -> BlockHashes:
    """Return the chained hashes of the prompt's complete blocks. seed: other data that must be equal (model, adapter)."""
    if isinstance(prompt, bytes):
        blocks = [prompt[i : i + BLOCK_BYTES] for i in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES)]
    else:
        whole = range(0, len(prompt) - BLOCK_IDS + 1, BLOCK_IDS)
        blocks = [b"".join(x.to_bytes(8, "little") for x in prompt[i : i + BLOCK_IDS]) for i in whole]
    hashes, last = [], xxhash.xxh3_64_intdigest(seed)
    for block in blocks[:MAX_BLOCKS]:
        last = xxhash.xxh3_64_intdigest(block, last)
        hashes.append(last)
    return tuple(hashes)


def prompt_and_seed(body: Mapping[str, Any]) -> tuple[bytes | list[int], bytes]:
    """Return (prompt, seed) of a request's JSON body in any form of the API; an unknown form gives an empty prompt.

    Invalid bodies are not rejected here: the replica reports the error.
    """
    seed = json.dumps([str(body.get("model", "")), str(body.get("adapter", ""))]).encode()
    if isinstance(body.get("messages"), list):
        # The chat template writes tools before the messages.
        head = _text(body["tools"]) if body.get("tools") else b""
        return head + b"".join(_message(m) for m in body["messages"]), seed
    value = body.get("prompt", body.get("input"))
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]  # several prompts go to one replica, chosen by the first
    if isinstance(value, list) and value and all(type(x) is int and 0 <= x < 2**63 for x in value):
        return value, seed
    if isinstance(value, str):
        return value.encode(errors="replace"), seed
    if isinstance(value, list):
        head = str(body.get("instructions") or "").encode(errors="replace")
        return head + b"".join(_message(m) for m in value), seed
    return b"", seed


def _message(message: Any) -> bytes:
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return f"<{message.get('role')}>{message['content']}".encode(errors="replace")
    return _text(message)


def _text(value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else json.dumps(value).encode()


class PrefixIndex:
    """The hashes of one replica, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._hashes)

    def match_length(self, hashes: BlockHashes) -> int:
        """Return the number of leading blocks that are in the index."""
        for n, block in enumerate(hashes):
            if block not in self._hashes:
                return n
        return len(hashes)

    def touch(self, hashes: BlockHashes) -> None:
        """Add the blocks of a sent prompt as the newest entries, the first block newest of all."""
        for block in reversed(hashes[: self.capacity]):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        self.evict(len(self._hashes) - self.capacity)

    def evict(self, blocks: int) -> None:
        """Remove this many of the oldest entries (none if negative)."""
        for _ in range(min(blocks, len(self._hashes))):
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries."""
        self._hashes.clear()
