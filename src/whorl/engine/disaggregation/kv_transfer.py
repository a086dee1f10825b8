"""Handing a prompt's pages from one engine to another: one reads prompts in, the other writes the answers.

    with export_pages(prefill, ids) as block: ...     the prompt's full pages, copied into one piece of shared memory
    import_pages(decode, block)                       they are in the other's cache, as if it had computed them

A prompt that is read in takes whole steps of products, a token that is written a few milliseconds: in one engine each makes
the other wait. Split over two, each keeps its own pace (Zhong et al. 2024, DistServe, arXiv 2401.09670; Patel et al. 2024,
Splitwise, arXiv 2311.18677). What goes over is exactly what a found prefix would have given: full pages under their chained
names. So the receiver needs no new state. It adds the request as ever, finds the pages and computes the rest, fewer
positions than a page has; every token is drawn there, by the code that always draws.

The block, in this order: 8 bytes of magic; the header's length (u32), the whole block's (u64), a checksum (xxh3-128 of all
that follows it); the header (JSON: fingerprint of the weights, their version, page size, names of the pages, and for each
layer group its window, first page and the types and shapes of its tensors); the tensors' pages one after another, each
tensor at a multiple of 64 bytes.

Ownership. The memory has no name (`slots.ring.anonymous`): it lives as long as somebody holds a descriptor or a view of it,
and a process that dies, however it dies, gives its own up. The sender closes its block when it has sent the descriptor on;
nobody has to clean up behind anybody, and nothing can be found that was left behind.

The subtle part is trust: pages under a wrong name would be read by every later prompt of that name. So a block is taken only
whole (the checksum), only from the same weights (the fingerprint is of every byte of them, not of a path), and only in the
same shapes and types; each refusal says which. Names are chained from the version on both sides.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from collections.abc import Sequence as Many
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from whorl.engine.cache.block_pool import EVICTED
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sequence import Sequence
from whorl.errors import ConfigError, DataError
from whorl.slots.ring import anonymous_memory

MAGIC = b"WHORLKV1"
_HEAD = struct.Struct("<8sIQ16s")
_ALIGNMENT = 64
DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
}

_fingerprint_cache: weakref.WeakKeyDictionary[Engine, tuple[int, str]] = weakref.WeakKeyDictionary()


def model_fingerprint(engine: Engine) -> str:
    """Of the model: its configuration and every byte of its weights. Made once for each version of them."""
    known = _fingerprint_cache.get(engine)
    if known is not None and known[0] == engine.version:
        return known[1]
    digest = xxhash.xxh3_128(repr(engine.model.config).encode())
    for name, tensor in sorted(engine.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    _fingerprint_cache[engine] = (engine.version, digest.hexdigest())
    return digest.hexdigest()


class KVBlock:
    """The pages of one prompt's beginning, in shared memory.

    Args:
        fd: of the memory; the block owns it and closes it.
        check: all of it now; else nothing of it may be used before `check` has said True.

    Raises:
        DataError: it is no such block, or not a whole one.
    """

    header: dict[str, Any]

    def __init__(self, fd: int, verify_checksum: bool = True) -> None:
        self.fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)
        self.n_bytes = os.fstat(fd).st_size
        self._memory: mmap.mmap | None = None
        if self.n_bytes < _HEAD.size:
            self._reject(f"it has {self.n_bytes} bytes", f"at least {_HEAD.size}")
        self._memory = memory = mmap.mmap(fd, self.n_bytes)
        magic, n_header, n_bytes, checksum = _HEAD.unpack_from(memory)
        if magic != MAGIC:
            self._reject(f"it begins with {magic!r}", repr(MAGIC))
        if n_bytes != self.n_bytes or _HEAD.size + n_header > n_bytes:
            self._reject(f"it says {n_bytes:,} bytes and has {self.n_bytes:,}", "a whole one")
        self._payload = _align(_HEAD.size + n_header)
        self._n_header, self._expected_checksum = n_header, checksum
        self._digest, self._verified_bytes = _start_checksum(memory, n_header), _HEAD.size
        if verify_checksum:
            self.verify()

    def verify(self, max_bytes: int | None = None) -> bool:
        """Goes on with the checksum, by `at_most` bytes: -> whether all is checked. Raises DataError: it is another."""
        assert self._memory is not None
        stop = self.n_bytes if max_bytes is None else min(self.n_bytes, self._verified_bytes + max_bytes)
        with memoryview(self._memory) as view, view[self._verified_bytes : stop] as part:
            self._digest.update(part)
        self._verified_bytes = stop
        if stop < self.n_bytes:
            return False
        if self._digest.digest() != self._expected_checksum:
            self._reject("its checksum is another", "what was written")
        self.header = json.loads(self._memory[_HEAD.size : _HEAD.size + self._n_header])
        return True

    @property
    def n_pages(self) -> int:
        """Of the text, from its beginning."""
        return len(self.header["names"])

    @property
    def n_positions(self) -> int:
        return self.n_pages * int(self.header["page_size"])

    def tensors(self, group: int) -> list[Tensor]:
        """Of each tensor of the group its pages [n, ...], as views of the shared memory."""
        assert self._memory is not None
        at, out = self._payload, list[Tensor]()
        for number, told in enumerate(self.header["groups"]):
            for name, shape in told["tensors"]:
                dtype, full = DTYPES[name], (told["pages"], *shape)
                if number == group:
                    out.append(_view(self._memory, at, dtype, full))
                at = _align(at + _n_bytes(dtype, full))
        return out

    def close(self) -> None:
        """Give up the memory, or, where views of it are still in use, the descriptor alone."""
        self._finalizer()
        if self._memory is not None:
            with suppress(BufferError):
                self._memory.close()

    def __enter__(self) -> KVBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reject(self, what: str, expected: str) -> None:
        self.close()
        raise DataError(
            f"a block of pages: {what}",
            expected=expected,
            do="let the prompt be computed where it is wanted; the sender may have died while it wrote",
        )


def export_pages(engine: Engine, ids: Many[int]) -> KVBlock:
    """What `engine` has cached of the beginning of the prompt `ids`, as a block of its own.

    Full pages only, and never the page of the last id, whose logits the receiver wants. The engine is left as it was.
    Without an adapter: engines name theirs each for itself, so that what one computed is not known to be another's.

    Raises:
        ConfigError: this engine does not share prefixes, or keeps a state that is not in pages.
    """
    _check_prefix_caching(engine)
    request = Request(id="export", ids=tuple(ids))
    sequence = Sequence(request, 0, list(ids), 0, engine._hash_seed(request))
    cache = engine.cache
    cache.acquire_prefix(sequence)  # holds the pages: nothing may evict them meanwhile
    try:
        n_pages = sequence.n_computed // cache.page_size
        held = [[p for p in pages if p != EVICTED] for pages in sequence.pages]
        groups = [
            {
                "window": group.window,
                "first": n_pages - len(pages),
                "pages": len(pages),
                "tensors": _tensor_specs(engine, number),
            }
            for number, (group, pages) in enumerate(zip(cache.groups, held, strict=True))
        ]
        told = {
            **_compatibility_fields(engine),
            "names": [h.hex() for h in sequence.page_hashes[:n_pages]],
            "groups": groups,
        }
        return _write_block(engine, told, held)
    finally:
        cache.release(sequence)


def _write_block(engine: Engine, header_fields: dict[str, Any], page_lists: list[list[int]]) -> KVBlock:
    header = json.dumps(header_fields).encode()
    places, at = list[list[tuple[int, tuple[int, ...]]]](), _align(_HEAD.size + len(header))
    for group in header_fields["groups"]:
        places.append([])
        for name, shape in group["tensors"]:
            full = (group["pages"], *shape)
            places[-1].append((at, full))
            at = _align(at + _n_bytes(DTYPES[name], full))
    fd = anonymous_memory(at, "whorl-pages")
    try:
        with mmap.mmap(fd, at) as memory:
            memory[_HEAD.size : _HEAD.size + len(header)] = header
            for number, pages in enumerate(page_lists):
                # Not through a copy of all of them: a long prompt's pages are as large as a model
                for t, (begin, full) in zip(engine.runner.page_tensors(number), places[number], strict=True):
                    if pages:
                        index = torch.tensor(pages, device=t.device)
                        into = _view(memory, begin, t.dtype, full)
                        if t.device.type == "cpu":
                            torch.index_select(t, 0, index, out=into)
                        else:
                            into.copy_(t[index])
                        del into  # a view keeps the map from being closed
            head = (MAGIC, len(header), at)
            _HEAD.pack_into(memory, 0, *head, b"")
            digest = _start_checksum(memory, len(header))
            with memoryview(memory) as view, view[_HEAD.size :] as rest:
                digest.update(rest)
            _HEAD.pack_into(memory, 0, *head, digest.digest())
    except BaseException:
        os.close(fd)
        raise
    return KVBlock(fd)


def import_pages(engine: Engine, block: KVBlock, max_pages: int | None = None) -> int:
    """Puts the block's pages into the cache of `engine`: -> positions of the prompt that a request would now find.

    Pages that are known already are not written again, so a long block can be taken in by and by, `at_most` pages a call,
    with steps in between; it is all in when the answer is `block.positions`. Fewer, and no more on the next call, means that
    the cache has no room beside what its sequences hold: the request is served all the same, and computes what is missing.

    Raises:
        ConfigError: this engine does not share prefixes, or keeps a state that is not in pages.
        DataError: the block is of other weights, of another type or shape; nothing has changed.
    """
    _check_prefix_caching(engine)
    _check_compatible(engine, block)
    names = [bytes.fromhex(name) for name in block.header["names"]]
    left = len(names) * len(engine.cache.groups) if max_pages is None else max_pages
    for number, group in enumerate(engine.cache.groups):
        pool, first = group.pool, block.header["groups"][number]["first"]
        known = [page for name in names[first:] if (page := pool.page_of(name)) is not None]
        pool.acquire(known)  # or those of this very prompt could be evicted to make room for its others
        missing = [n for n in range(first, len(names)) if pool.page_of(names[n]) is None]
        missing = missing[: min(left, pool.n_available)]
        pages = pool.allocate(len(missing)) or []
        if pages:
            index = torch.tensor([n - first for n in missing])
            engine.runner.write_pages(number, pages, [t[index] for t in block.tensors(number)])
            for page, n in zip(pages, missing, strict=True):
                pool.mark_full(page, names[n])
        left -= len(pages)
        in_order = [page for name in names[first:] if (page := pool.page_of(name)) is not None]
        pool.release(in_order)
    return _n_prefix_pages(engine, names) * engine.cache.page_size


def _n_prefix_pages(engine: Engine, hashes: list[bytes]) -> int:
    """Pages of the beginning that all groups know enough of to go on behind the last name (else 0, or all before a gap)."""
    best = len(hashes)
    for group in engine.cache.groups:
        if group.window is None:
            best = min(best, len(group.pool.lookup(hashes)))
    windows = [group for group in engine.cache.groups if group.window is not None]
    while best and any(
        group.pool.page_of(hashes[page]) is None
        for group in windows
        for page in range(group.first_visible_page(best * engine.cache.page_size), best)
    ):
        best -= 1
    return best


def _compatibility_fields(engine: Engine) -> dict[str, Any]:
    """What must be equal on both sides, beside the tensors."""
    return {
        "version": engine.version,
        "fingerprint": model_fingerprint(engine),
        "page_size": engine.cache.page_size,
    }


def _tensor_specs(engine: Engine, group: int) -> list[list[Any]]:
    """(type, shape of a page) of all that a page of the group is, layer by layer."""
    tensors = engine.runner.page_tensors(group)
    return [[str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for t in tensors]


def _check_compatible(engine: Engine, block: KVBlock) -> None:
    told, own = block.header, _compatibility_fields(engine)
    names = {
        "page_size": "pages of {} positions",
        "version": "weights of version {}",
        "fingerprint": "weights with the fingerprint {}",
    }
    for name, words in names.items():
        if told[name] != own[name]:
            raise DataError(
                f"a block of pages from {words.format(told[name])}",
                expected=words.format(own[name]),
                do="start both engines from the same model with the same settings, and update both together",
            )
    for number, group in enumerate(engine.cache.groups):
        mine = {"window": group.window, "tensors": _tensor_specs(engine, number)}
        theirs = told["groups"][number] if number < len(told["groups"]) else {}
        if {key: theirs.get(key) for key in mine} != mine:
            raise DataError(
                f"a block of pages whose layers keep {theirs.get('tensors')} a page, window {theirs.get('window')}",
                expected=f"{mine['tensors']}, window {group.window}",
                do="start both engines with the same type of cache",
            )


def _check_prefix_caching(engine: Engine) -> None:
    if engine.runner.has_recurrent_layers:
        raise ConfigError(
            "pages of a model with recurrent layers",
            expected="a model all of whose layers keep pages: the state of the others is not in them",
            do="serve it with whole replicas instead",
        )
    if not engine.cache.enable_prefix_caching:
        raise ConfigError("enable_prefix_caching is off", expected="on: pages are handed over as a found prefix")


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _n_bytes(dtype: torch.dtype, shape: Many[int]) -> int:
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


def _view(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: Many[int]) -> Tensor:
    count = _n_bytes(dtype, shape) // dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _start_checksum(memory: mmap.mmap, n_header: int) -> Any:
    """Of the two lengths; what follows the head is to be added."""
    return xxhash.xxh3_128(struct.pack("<IQ", n_header, len(memory)))
