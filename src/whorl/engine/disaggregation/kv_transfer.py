"""Transfer of a prompt's KV pages from a prefill engine to a decode engine.

    with export_pages(prefill, ids) as block: ...     copies the prompt's full pages into shared memory
    import_pages(decode, block)                       adds them to the other engine's prefix cache

Prefill takes long steps, decoding short ones; in one engine each delays the other (Zhong et al. 2024, DistServe,
arXiv:2401.09670; Patel et al. 2024, Splitwise, arXiv:2311.18677). The transferred pages are full pages under their prefix
hashes, as a cached prefix. So the receiver needs no new state: it adds the request, finds the prefix and computes the rest,
less than a page. It samples every token.

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
import weakref
from collections.abc import Sequence as SequenceABC
from typing import Any

import torch
import xxhash

from whorl.engine.cache.block_pool import EVICTED
from whorl.engine.disaggregation.kv_block import (
    DTYPES,
    HEAD,
    MAGIC,
    KVBlock,
    align,
    n_bytes_of,
    start_checksum,
    view_of,
)
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sequence import Sequence
from whorl.errors import ConfigError, DataError
from whorl.slots.ring import anonymous_memory

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
    places, offset = list[list[tuple[int, tuple[int, ...]]]](), align(HEAD.size + len(header))
    for group in header_fields["groups"]:
        places.append([])
        for dtype_name, shape in group["tensors"]:
            shape_of_pages = (group["pages"], *shape)
            places[-1].append((offset, shape_of_pages))
            offset = align(offset + n_bytes_of(DTYPES[dtype_name], shape_of_pages))
    fd = anonymous_memory(offset, "whorl-pages")
    try:
        with mmap.mmap(fd, offset) as memory:
            memory[HEAD.size : HEAD.size + len(header)] = header
            for number, pages in enumerate(page_lists):
                # No full copy: a long prompt's pages may be as large as a model.
                for t, (begin, shape_of_pages) in zip(
                    engine.runner.caches.page_tensors(number), places[number], strict=True
                ):
                    if pages:
                        index = torch.tensor(pages, device=t.device)
                        target = view_of(memory, begin, t.dtype, shape_of_pages)
                        if t.device.type == "cpu":
                            torch.index_select(t, 0, index, out=target)
                        else:
                            target.copy_(t[index])
                        del target  # an open view would keep the map from closing
            head = (MAGIC, len(header), offset)
            HEAD.pack_into(memory, 0, *head, b"")
            digest = start_checksum(memory, len(header))
            with memoryview(memory) as view, view[HEAD.size :] as rest:
                digest.update(rest)
            HEAD.pack_into(memory, 0, *head, digest.digest())
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
    return engine.cache.longest_prefix(hashes) * engine.cache.page_size


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
