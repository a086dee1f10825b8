"""Transfer of KV pages between engines: every model family, every rejection, and no leaks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine.parity import FAMILIES, GREEDY, check, decoder, run

from whorl.engine.config import EngineConfig
from whorl.engine.disaggregation.kv_transfer import KVBlock, export_pages, import_pages, model_fingerprint
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.errors import ConfigError, DataError

CONFIG = EngineConfig(
    block_size=4, max_num_seqs=4, max_model_len=60, kv_cache_tokens=240, max_num_batched_tokens=16
)
IDS = torch.randint(0, 50, (30,), generator=torch.Generator().manual_seed(5)).tolist()


def request(name: str, n: int = 30, **more: Any) -> Request:
    return Request(id=name, ids=tuple(IDS[:n]), **{"sampling": GREEDY, "max_tokens": 9, **more})


def prefilled(model: Any = None, config: EngineConfig = CONFIG) -> Engine:
    engine = Engine(model or decoder(), config)
    run(engine, [request("read", max_tokens=1)])
    return engine


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208


@pytest.mark.parametrize("family", FAMILIES)
def test_imported_pages_give_same_tokens(family: str) -> None:
    sender = Engine(FAMILIES[family](), CONFIG)
    if sender.runner.has_recurrent_layers:
        with pytest.raises(ConfigError, match="recurrent"):
            export_pages(sender, IDS)
        return
    run(sender, [request("read", max_tokens=1)])
    receiver = Engine(FAMILIES[family](), CONFIG)
    # So that page numbers differ.
    run(receiver, [Request(id="other", ids=(7,) * 11, sampling=GREEDY, max_tokens=3)])
    with export_pages(sender, IDS) as block:
        assert block.n_positions == 28
        assert import_pages(receiver, block) == 28
    sender.check_integrity()
    receiver.check_integrity()
    receiver.add(request("write"))
    tokens, cached = [], 0
    while receiver.busy:
        for delta in receiver.step():
            tokens += delta.tokens
            cached = max(cached, delta.cached_tokens)
        receiver.check_integrity()
    assert cached == 28, "decoding begins with a full hit"
    check(FAMILIES[family](), [request("write")], {"write": tokens})
    alone = run(Engine(FAMILIES[family](), CONFIG), [request("write")])["write"]
    assert [t.id for t in tokens] == [t.id for t in alone]
    for a, b in zip(tokens, alone, strict=True):
        assert abs(a.log_prob - b.log_prob) < 1e-4 and abs(a.raw_log_prob - b.raw_log_prob) < 1e-4


def test_int8_pages_transfer_with_scales() -> None:
    config = CONFIG.model_copy(update={"kv_cache_dtype": "int8"})
    receiver = Engine(decoder(), config)
    with export_pages(prefilled(config=config), IDS) as block:
        assert import_pages(receiver, block) == 28
    got, alone = (run(e, [request("write")])["write"] for e in (receiver, Engine(decoder(), config)))
    assert [t.id for t in got] == [t.id for t in alone]
    assert all(abs(a.log_prob - b.log_prob) < 1e-4 for a, b in zip(got, alone, strict=True))


def test_import_pages_in_slices() -> None:
    receiver = Engine(decoder(), CONFIG)
    with export_pages(prefilled(), IDS) as block:
        found = [import_pages(receiver, block, max_pages=3) for _ in range(4)]
        assert found == [12, 24, 28, 28]
    receiver.check_integrity()


def test_import_pages_into_full_cache_keeps_running_pages() -> None:
    receiver = Engine(decoder(), CONFIG.model_copy(update={"kv_cache_tokens": 60}))
    receiver.add(Request(id="runs", ids=(7,) * 40, sampling=GREEDY, max_tokens=9))
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
    got = run(receiver, [request("write")])["write"]
    check(decoder(), [request("write")], {"write": got})


def test_export_of_uncached_prefix_is_empty_block() -> None:
    with export_pages(prefilled(), [1, 2, 3]) as block:
        assert block.n_positions == 0 and import_pages(Engine(decoder(), CONFIG), block) == 0


def test_import_rejects_other_weights_dtypes_and_sizes() -> None:
    with export_pages(prefilled(), IDS) as block:
        for receiver, message in [
            (Engine(decoder(), CONFIG.model_copy(update={"block_size": 8})), "pages of 4 positions"),
            (Engine(decoder(n_layers=1), CONFIG), "fingerprint"),
            (Engine(decoder(), CONFIG.model_copy(update={"kv_cache_dtype": "int8"})), "same kv_cache_dtype"),
        ]:
            with pytest.raises(DataError, match=message):
                import_pages(receiver, block)
            assert receiver.cache.groups[0].pool.n_cached == 0
        receiver = Engine(decoder(), CONFIG)
        name, weight = next(iter(receiver.model.named_parameters()))
        receiver.update_weights({name: weight.detach() + 1}, version=3)
        with pytest.raises(DataError, match="version 0"):
            import_pages(receiver, block)
        receiver = Engine(decoder(), CONFIG)
        with torch.no_grad():
            weight = next(receiver.model.parameters())
            weight[-1, -1] += 1e-3  # a single weight
        with pytest.raises(DataError, match="fingerprint"):
            import_pages(receiver, block)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        export_pages(Engine(decoder(), CONFIG.model_copy(update={"enable_prefix_caching": False})), IDS)


def test_model_fingerprint_changes_with_version() -> None:
    engine = Engine(decoder(), CONFIG)
    first = model_fingerprint(engine)
    assert model_fingerprint(engine) == first == model_fingerprint(Engine(decoder(), CONFIG))
    name, weight = next(iter(engine.model.named_parameters()))
    engine.update_weights({name: weight.detach() + 1}, version=1)
    assert model_fingerprint(engine) != first


@settings(max_examples=60, deadline=None)
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
    assert descriptors() == before, "a block that is refused is closed"


SENDER = prefilled()


def memory_of(content: bytes) -> int:
    from whorl.slots.ring import anonymous_memory

    fd = anonymous_memory(len(content))
    os.write(fd, content)
    return fd


def test_transfer_leaks_no_descriptors_or_pages() -> None:
    receiver, before = Engine(decoder(), CONFIG), descriptors()
    for _ in range(20):
        with export_pages(SENDER, IDS) as block:
            import_pages(receiver, block)
    assert descriptors() == before
    SENDER.check_integrity()
    assert SENDER.cache.groups[0].pool.n_used == 0
