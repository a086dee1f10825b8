"""Transfer of a prompt's KV pages from a prefill engine to a decode engine.

    with export_pages(prefill, ids) as block: ...     copies the prompt's full pages into shared memory
    import_pages(decode, block)                       adds them to the other engine's prefix cache

Prefill takes long steps, decoding short ones; in one engine each delays the other (Zhong et al. 2024, DistServe,
arXiv:2401.09670; Patel et al. 2024, Splitwise, arXiv:2311.18677). The transferred pages are full pages under their prefix
hashes, as a cached prefix. So the receiver needs no new state: it adds the request, finds the prefix and computes the rest,
less than a page. It samples every token.

The block has 8 bytes of magic, the header's length (u32), the block's length (u64), a checksum (xxh3-128 of the rest), the
header, and the tensors' pages at multiples of 64 bytes. The header is JSON: fingerprint and version of the weights, page
size, page hashes; for each layer group its window, first page, and dtypes and shapes of its tensors.

Ownership. The memory has no name (`slots.ring.anonymous`): it exists while a process holds a descriptor or a view, so a
process that dies leaves nothing behind. The sender closes its block after sending the descriptor.

The subtle point is trust: pages under a wrong hash would corrupt every later prompt with that prefix. So a block is accepted
only with a valid checksum, equal weights (the fingerprint covers every byte) and equal shapes and dtypes. Each error names
the difference. Both sides compute hashes from the version of the weights.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from collections.abc import Sequence as SequenceABC
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
    """Hash of the model's configuration and of every byte of its weights; cached per version of the weights."""
    cached = _fingerprint_cache.get(engine)
    if cached is not None and cached[0] == engine.version:
        return cached[1]
    digest = xxhash.xxh3_128(repr(engine.model.config).encode())
    for key, tensor in sorted(engine.model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    _fingerprint_cache[engine] = (engine.version, digest.hexdigest())
    return digest.hexdigest()


class KVBlock:
    """The pages of one prompt's prefix, in shared memory.

    Args:
        fd: of the memory; the block owns it and closes it.
        verify_checksum: verify now; otherwise `verify` must return True before the contents are used.

    Raises:
        DataError: the memory holds no complete block.
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
            self._reject(f"it starts with {magic!r}", repr(MAGIC))
        if n_bytes != self.n_bytes or _HEAD.size + n_header > n_bytes:
            self._reject(
                f"its header gives {n_bytes:,} bytes, and it has {self.n_bytes:,}", "a complete block"
            )
        self._payload = _align(_HEAD.size + n_header)
        self._n_header, self._expected_checksum = n_header, checksum
        self._digest, self._verified_bytes = _start_checksum(memory, n_header), _HEAD.size
        if verify_checksum:
            self.verify()

    def verify(self, max_bytes: int | None = None) -> bool:
        """Continue the checksum by at most `max_bytes`; returns whether it is complete. Raises DataError on a mismatch."""
        assert self._memory is not None
        stop = self.n_bytes if max_bytes is None else min(self.n_bytes, self._verified_bytes + max_bytes)
        with memoryview(self._memory) as view, view[self._verified_bytes : stop] as part:
            self._digest.update(part)
        self._verified_bytes = stop
        if stop < self.n_bytes:
            return False
        if self._digest.digest() != self._expected_checksum:
            self._reject("its checksum does not match", "the checksum of its contents")
        self.header = json.loads(self._memory[_HEAD.size : _HEAD.size + self._n_header])
        return True

    @property
    def n_pages(self) -> int:
        """Pages of the prefix."""
        return len(self.header["names"])

    @property
    def n_positions(self) -> int:
        return self.n_pages * int(self.header["page_size"])

    def tensors(self, group: int) -> list[Tensor]:
        """Pages [n, ...] of each tensor of the group, as views of the shared memory."""
        assert self._memory is not None
        offset, out = self._payload, list[Tensor]()
        for number, group_fields in enumerate(self.header["groups"]):
            for dtype_name, shape in group_fields["tensors"]:
                dtype, shape_of_pages = DTYPES[dtype_name], (group_fields["pages"], *shape)
                if number == group:
                    out.append(_view(self._memory, offset, dtype, shape_of_pages))
                offset = _align(offset + _n_bytes(dtype, shape_of_pages))
        return out

    def close(self) -> None:
        """Release the memory or, if views of it still exist, the descriptor alone."""
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
            f"a block of KV pages: {what}",
            expected=expected,
            do="compute the prompt in the decode engine; the sender may have died during the write",
        )


def export_pages(engine: Engine, ids: SequenceABC[int]) -> KVBlock:
    """Return the pages that `engine` has cached of the prefix of `ids`, as a block.

    Full pages only, and never the page of the last id, whose logits the receiver computes. The engine is unchanged. The
    block is for requests without an adapter, because adapter keys differ between engines.

    Raises:
        ConfigError: prefix caching is off, or some layers keep recurrent states.
    """
    check_prefix_caching(engine)
    request = Request(id="export", ids=tuple(ids))
    sequence = Sequence(request, 0, list(ids), 0, engine._hash_seed(request))
    cache = engine.cache
    cache.acquire_prefix(sequence)  # holds references, so the pages are not evicted meanwhile
    try:
        n_pages = sequence.n_computed // cache.page_size
        page_lists = [[p for p in pages if p != EVICTED] for pages in sequence.pages]
        groups = [
            {
                "window": group.window,
                "first": n_pages - len(pages),
                "pages": len(pages),
                "tensors": _tensor_specs(engine, number),
            }
            for number, (group, pages) in enumerate(zip(cache.groups, page_lists, strict=True))
        ]
        header_fields = {
            **_compatibility_fields(engine),
            "names": [h.hex() for h in sequence.page_hashes[:n_pages]],
            "groups": groups,
        }
        return _write_block(engine, header_fields, page_lists)
    finally:
        cache.release(sequence)


def _write_block(engine: Engine, header_fields: dict[str, Any], page_lists: list[list[int]]) -> KVBlock:
    header = json.dumps(header_fields).encode()
    places, offset = list[list[tuple[int, tuple[int, ...]]]](), _align(_HEAD.size + len(header))
    for group in header_fields["groups"]:
        places.append([])
        for dtype_name, shape in group["tensors"]:
            shape_of_pages = (group["pages"], *shape)
            places[-1].append((offset, shape_of_pages))
            offset = _align(offset + _n_bytes(DTYPES[dtype_name], shape_of_pages))
    fd = anonymous_memory(offset, "whorl-pages")
    try:
        with mmap.mmap(fd, offset) as memory:
            memory[_HEAD.size : _HEAD.size + len(header)] = header
            for number, pages in enumerate(page_lists):
                # No full copy: a long prompt's pages may be as large as a model.
                for t, (begin, shape_of_pages) in zip(
                    engine.runner.caches.page_tensors(number), places[number], strict=True
                ):
                    if pages:
                        index = torch.tensor(pages, device=t.device)
                        target = _view(memory, begin, t.dtype, shape_of_pages)
                        if t.device.type == "cpu":
                            torch.index_select(t, 0, index, out=target)
                        else:
                            target.copy_(t[index])
                        del target  # an open view would keep the map from closing
            head = (MAGIC, len(header), offset)
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
    """Add the block's pages to the cache of `engine`; returns the prompt positions that a request would now find.

    Cached pages are not written again, so a long block can be imported in slices of `max_pages` with steps in between. The
    import is complete when the result is `block.n_positions`. A smaller result that no longer grows means that the cache is
    full; the request still works and computes the missing positions.

    Raises:
        ConfigError: prefix caching is off, or some layers keep recurrent states.
        DataError: the block has other weights, dtypes or shapes; nothing has changed.
    """
    check_prefix_caching(engine)
    _check_compatible(engine, block)
    hashes = [bytes.fromhex(page_hash) for page_hash in block.header["names"]]
    pages_left = len(hashes) * len(engine.cache.groups) if max_pages is None else max_pages
    for number, group in enumerate(engine.cache.groups):
        pool, first = group.pool, block.header["groups"][number]["first"]
        cached = [page for page_hash in hashes[first:] if (page := pool.page_of(page_hash)) is not None]
        pool.acquire(cached)  # otherwise allocation could evict pages of this prompt
        missing = [n for n in range(first, len(hashes)) if pool.page_of(hashes[n]) is None]
        missing = missing[: min(pages_left, pool.n_available)]
        pages = pool.allocate(len(missing)) or []
        if pages:
            index = torch.tensor([n - first for n in missing])
            engine.runner.write_pages(number, pages, [t[index] for t in block.tensors(number)])
            for page, n in zip(pages, missing, strict=True):
                pool.mark_full(page, hashes[n])
        pages_left -= len(pages)
        in_order = [page for page_hash in hashes[first:] if (page := pool.page_of(page_hash)) is not None]
        pool.release(in_order)
    return _n_prefix_pages(engine, hashes) * engine.cache.page_size


def _n_prefix_pages(engine: Engine, hashes: list[bytes]) -> int:
    """Pages of the prefix that lets all groups continue after the last hash; else 0, or all before a gap."""
    n_pages = len(hashes)
    for group in engine.cache.groups:
        if group.window is None:
            n_pages = min(n_pages, len(group.pool.lookup(hashes)))
    windows = [group for group in engine.cache.groups if group.window is not None]
    while n_pages and any(
        group.pool.page_of(hashes[page]) is None
        for group in windows
        for page in range(group.first_visible_page(n_pages * engine.cache.page_size), n_pages)
    ):
        n_pages -= 1
    return n_pages


def _compatibility_fields(engine: Engine) -> dict[str, Any]:
    """Header fields that must be equal on both sides, tensors excluded."""
    return {
        "version": engine.version,
        "fingerprint": model_fingerprint(engine),
        "page_size": engine.cache.page_size,
    }


def _tensor_specs(engine: Engine, group: int) -> list[list[Any]]:
    """(dtype, shape of a page) of every page tensor of the group, layer by layer."""
    tensors = engine.runner.caches.page_tensors(group)
    return [[str(t.dtype).removeprefix("torch."), list(t.shape[1:])] for t in tensors]


def _check_compatible(engine: Engine, block: KVBlock) -> None:
    header, own = block.header, _compatibility_fields(engine)
    templates = {
        "page_size": "pages of {} positions",
        "version": "weights of version {}",
        "fingerprint": "weights with the fingerprint {}",
    }
    for key, template in templates.items():
        if header[key] != own[key]:
            raise DataError(
                f"a block of KV pages from {template.format(header[key])}",
                expected=template.format(own[key]),
                do="start both engines from the same model with the same settings, and update both together",
            )
    for number, group in enumerate(engine.cache.groups):
        own_group = {"window": group.window, "tensors": _tensor_specs(engine, number)}
        other_group = header["groups"][number] if number < len(header["groups"]) else {}
        if {key: other_group.get(key) for key in own_group} != own_group:
            raise DataError(
                f"a block of KV pages with {other_group.get('tensors')} per page, window {other_group.get('window')}",
                expected=f"{own_group['tensors']}, window {group.window}",
                do="start both engines with the same kv_cache_dtype",
            )


def check_prefix_caching(engine: Engine) -> None:
    """Raise ConfigError unless all state of a sequence is in pages of the prefix cache."""
    if engine.runner.has_recurrent_layers:
        raise ConfigError(
            "the model has recurrent layers",
            expected="a model that keeps all of its state in pages",
            do="serve it with whole engines: `whorl serve --replicas`, without --prefill and --decode",
        )
    if not engine.cache.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching is off", expected="on, because pages are transferred as a cached prefix"
        )


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _n_bytes(dtype: torch.dtype, shape: SequenceABC[int]) -> int:
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


def _view(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: SequenceABC[int]) -> Tensor:
    count = _n_bytes(dtype, shape) // dtype.itemsize
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _start_checksum(memory: mmap.mmap, n_header: int) -> Any:
    """Start the checksum with the two lengths; the caller adds the rest."""
    return xxhash.xxh3_128(struct.pack("<IQ", n_header, len(memory)))
