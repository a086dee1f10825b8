"""Transfer of KV pages between engines: every model family, every rejection, and no leaks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine import parity
from tests.support.engine.parity import FAMILIES, assert_same, check, config, decoder, run_one

from whorl.engine.disaggregation.kv_block import KVBlock
from whorl.engine.disaggregation.kv_transfer import export_pages, import_pages, model_fingerprint
from whorl.engine.engine import Engine
from whorl.errors import ConfigError, DataError
from whorl.slots.ring import anonymous_memory

IDS = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(5)).tolist()


WRITE = parity.request("write", IDS, max_tokens=9)


def make_engine(family: str = "decoder", **changes: Any) -> Engine:
    return Engine(FAMILIES[family](), config(**{"kv_cache_tokens": 240, **changes}))


def prefilled(**changes: Any) -> Engine:
    engine = make_engine(**changes)
    run_one(engine, parity.request("read", IDS, max_tokens=1))
    return engine


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208


@pytest.mark.parametrize(("family", "dtype"), [*((f, "model") for f in FAMILIES), ("decoder", "int8")])
def test_imported_pages_give_same_tokens(family: str, dtype: str) -> None:
    setup: dict[str, Any] = {"family": family, "kv_cache_dtype": dtype}
    if make_engine(**setup).runner.has_recurrent_layers:
        with pytest.raises(ConfigError, match="recurrent"):
            export_pages(make_engine(**setup), IDS)
        return
    sender, receiver = prefilled(**setup), make_engine(**setup)
    run_one(receiver, parity.request("other", (7,) * 11))  # so that page numbers differ
    with export_pages(sender, IDS) as block:
        assert block.n_positions == 28
        assert import_pages(receiver, block) == 28
    sender.check_integrity()
    receiver.check_integrity()
    deltas = parity.drain(receiver, [WRITE])["write"]
    assert deltas[0].cached_tokens == 28  # decoding begins with a full hit
    tokens = parity.tokens_of(deltas)
    assert_same(tokens, run_one(make_engine(**setup), WRITE))
    if dtype == "model":
        check(FAMILIES[family](), [WRITE], {"write": tokens})


def test_import_pages_in_slices() -> None:
    receiver = make_engine()
    with export_pages(prefilled(), IDS) as block:
        found = [import_pages(receiver, block, max_pages=3) for _ in range(4)]
        assert found == [12, 24, 28, 28]
    receiver.check_integrity()


def test_import_pages_into_full_cache_keeps_running_pages() -> None:
    receiver = make_engine(max_model_len=60, kv_cache_tokens=60)
    receiver.add(parity.request("runs", (7,) * 40, max_tokens=9))
    while not any(d.tokens for d in receiver.step()):
        pass
    pages_before = list(receiver.sequences()[0].pages[0])
    with export_pages(prefilled(), IDS) as block:
        found = import_pages(receiver, block)
        assert 0 < found < 28 and found == import_pages(receiver, block)
    assert receiver.sequences()[0].pages[0][: len(pages_before)] == pages_before
    receiver.check_integrity()
    assert receiver.abort("runs")
    receiver.step()
    check(decoder(), [WRITE], {"write": run_one(receiver, WRITE)})


def test_export_of_uncached_prefix_is_empty_block() -> None:
    with export_pages(prefilled(), [1, 2, 3]) as block:
        assert block.n_positions == 0 and import_pages(make_engine(), block) == 0


def test_import_rejects_other_weights_dtypes_and_sizes() -> None:
    nudged, updated = make_engine(), make_engine()
    with torch.no_grad():
        next(nudged.model.parameters())[-1, -1] += 1e-3  # a single weight
    add_one(updated, version=3)
    receivers = [
        (make_engine(block_size=8), "pages of 4 positions"),
        (Engine(decoder(n_layers=1), config()), "fingerprint"),
        (make_engine(kv_cache_dtype="int8"), "same kv_cache_dtype"),
        (updated, "version 0"),
        (nudged, "fingerprint"),
    ]
    with export_pages(prefilled(), IDS) as block:
        for receiver, message in receivers:
            with pytest.raises(DataError, match=message):
                import_pages(receiver, block)
            assert receiver.cache.groups[0].pool.n_cached == 0
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        export_pages(make_engine(enable_prefix_caching=False), IDS)


def add_one(engine: Engine, version: int) -> None:
    """Update one tensor of the weights."""
    name, weight = next(iter(engine.model.named_parameters()))
    engine.update_weights({name: weight.detach() + 1}, version=version)


def test_model_fingerprint_changes_with_version() -> None:
    engine = make_engine()
    first = model_fingerprint(engine)
    assert model_fingerprint(engine) == first == model_fingerprint(make_engine())
    add_one(engine, version=1)
    assert model_fingerprint(engine) != first


@given(st.data())
def test_kv_block_rejects_any_damage(data: st.DataObject) -> None:
    with export_pages(SENDER, IDS) as good:
        content = bytearray(os.pread(good.fd, good.n_bytes, 0))
    damage = data.draw(st.sampled_from(["flip", "cut", "longer", "begin"]))
    if damage == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif damage == "longer":
        content += b"\0" * data.draw(st.integers(1, 100))
    else:  # a sender that died before it wrote the head
        content[:36] = bytes(36)
    before, at_once = descriptors(), data.draw(st.booleans())
    with pytest.raises(DataError, match="a block of KV pages"):
        block = KVBlock(memory_of(bytes(content)), verify_checksum=at_once)
        while not block.verify(1000):
            pass
    assert descriptors() == before  # a rejected block is closed


SENDER = prefilled()


def memory_of(content: bytes) -> int:
    fd = anonymous_memory(len(content))
    os.write(fd, content)
    return fd


def test_transfer_leaks_no_descriptors_or_pages() -> None:
    receiver, before = make_engine(), descriptors()
    for _ in range(20):
        with export_pages(SENDER, IDS) as block:
            import_pages(receiver, block)
    assert descriptors() == before
    SENDER.check_integrity()
    assert SENDER.cache.groups[0].pool.n_used == 0
