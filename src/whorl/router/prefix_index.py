"""What a replica's prefix cache probably holds, guessed from what was sent there: chained block hashes, oldest forgotten.

A prompt is cut into blocks, and a block's hash covers everything before it: h(i) = hash(h(i-1), block i). So one number
stands for a whole prefix, as in the engine's own page table, and a set of such numbers is a radix tree without nodes: the
longest cached prefix is found by walking a chain until the first number that is not in the set. (The tree itself: Zheng et
al. 2023, "SGLang", arXiv 2312.07104; chained hashes: Kwon et al. 2023, "PagedAttention", arXiv 2309.06180, section 4.4.)

The router sees text, not tokens: tokenising each prompt twice would cost more than the guess is worth. A block is `BYTES` of
the prompt's text, which is close to one page of tokens, or `IDS` ids where ids were sent. The text is made of the fields
that make up the prompt, in their order (`prompt_of`), so that two requests that differ in their sampling alone are the same.

The subtle part is the order of forgetting. A chain is touched from its end to its beginning: then a prefix is always younger
than what continues it, the oldest entry is always a leaf, and forgetting the oldest never leaves a chain without its start.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

BlockHashes = tuple[int, ...]

BLOCK_BYTES = 128  # of text, a block: about 32 tokens
BLOCK_IDS = 32
MAX_BLOCKS = 2048  # of one prompt; what follows is not looked at


def block_hashes(prompt: bytes | Sequence[int], seed: bytes = b"") -> BlockHashes:
    """The chained hashes of the prompt's whole blocks; `seed`: what must be equal besides (model, adapter)."""
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
    """(prompt, seed) of a request's JSON body, whichever of the API's forms it has; an unknown form is an empty prompt.

    Nothing is refused here: what is wrong with a body, the replica says.
    """
    seed = json.dumps([str(body.get("model", "")), str(body.get("adapter", ""))]).encode()
    if isinstance(body.get("messages"), list):
        # Tools are part of what the template writes before the messages.
        head = _text(body["tools"]) if body.get("tools") else b""
        return head + b"".join(_message(m) for m in body["messages"]), seed
    value = body.get("prompt", body.get("input"))
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]  # several prompts in one request go to one replica: by the first
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
    """The hashes of one replica, `capacity` at most."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._hashes)

    def match_length(self, hashes: BlockHashes) -> int:
        """Blocks at the chain's start that are known."""
        for n, block in enumerate(hashes):
            if block not in self._hashes:
                return n
        return len(hashes)

    def touch(self, hashes: BlockHashes) -> None:
        """The prompt was sent: its blocks are the youngest now, the first of them the youngest of all."""
        for block in reversed(hashes[: self.capacity]):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        self.evict(len(self._hashes) - self.capacity)

    def evict(self, blocks: int) -> None:
        """Forget this many of the oldest (none where negative)."""
        for _ in range(min(blocks, len(self._hashes))):
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the replica began anew."""
        self._hashes.clear()
