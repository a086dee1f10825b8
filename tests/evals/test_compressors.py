"""Compressors: exact sizes, the order of the settings, and empty input."""

from __future__ import annotations

import gzip
import lzma
import random

import pytest

from whorl.errors import DataError
from whorl.evals.baselines import spread
from whorl.evals.compressors import CompressionResult, measure_compressors, ppmd_size


def _code(seed: int, lines: int) -> bytes:
    """Source-like text. All seeds share its names, so a training split helps."""
    names = [f"name_{random.Random(i).getrandbits(40):x}" for i in range(60)]
    rng = random.Random(seed)
    text = [f"{rng.choice(names)} = {rng.choice(names)}({rng.random():.3f})\n" for _ in range(lines)]
    return "".join(text).encode()


HELD_OUT = [_code(seed, 40) for seed in range(6)]
TRAIN = [_code(100 + seed, 60) for seed in range(40)]
STREAM, PRIMER = b"".join(HELD_OUT), b"".join(TRAIN)


def xz_size(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


@pytest.fixture(scope="module")
def results() -> dict[str, CompressionResult]:
    seen: list[CompressionResult] = []
    measured = measure_compressors(HELD_OUT, TRAIN, on_result=seen.append)
    assert sorted(seen, key=lambda r: r.name) == sorted(measured, key=lambda r: r.name)
    return {result.name: result for result in measured}


def test_sizes_match_libraries(results: dict[str, CompressionResult]) -> None:
    found = {name: result.compressed_bytes for name, result in results.items()}
    assert found["gzip -9, one stream"] == len(gzip.compress(STREAM, 9))
    assert found["xz -9e, file by file"] == sum(map(xz_size, HELD_OUT))
    assert found["xz -9e, one stream"] == xz_size(STREAM)
    assert all(r.raw_bytes == len(STREAM) for r in results.values())
    bits = results["xz -9e, one stream"].bits_per_byte
    assert bits == pytest.approx(8 * found["xz -9e, one stream"] / len(STREAM))


def test_more_context_gives_smaller_sizes(results: dict[str, CompressionResult]) -> None:
    found = {name: result.compressed_bytes for name, result in results.items()}
    for method in ("xz -9e", "PPMd order 10"):
        assert found[f"{method}, one stream"] < found[f"{method}, file by file"]
    assert found["PPMd order 10, primed"] < found["PPMd order 10, one stream"]
    assert found["zstd -19, dictionary"] < found["zstd -19, file by file"]


def test_ppmd_primed_size_is_difference() -> None:
    # The coder buffers a few bytes between the two streams.
    assert abs(ppmd_size(STREAM, PRIMER) - (ppmd_size(PRIMER + STREAM) - ppmd_size(PRIMER))) <= 8


def test_random_bytes_do_not_compress() -> None:
    noise = random.Random(0).randbytes(20_000)
    assert all(result.bits_per_byte > 7.99 for result in measure_compressors([noise]))


def test_no_training_split_skips_primed_settings() -> None:
    assert {r.setting for r in measure_compressors(HELD_OUT)} == {"one stream", "file by file"}


def test_tiny_training_split_gives_dictionary() -> None:
    assert "zstd -19, dictionary" in {r.name for r in measure_compressors([b"x = 1\n"], [b"y = 2\n"])}


@pytest.mark.parametrize("held_out", [[], [b""], [b"", b""]])
def test_compressors_reject_empty_split(held_out: list[bytes]) -> None:
    with pytest.raises(DataError, match="held-out split is empty"):
        measure_compressors(held_out, TRAIN)


@pytest.mark.parametrize(
    ("n", "fraction", "kept"), [(6, 1.0, 6), (30, 0.1, 3), (79, 0.1, 8), (3, 0.01, 1), (0, 0.5, 0)]
)
def test_spread_keeps_a_fraction_at_equal_distances(n: int, fraction: float, kept: int) -> None:
    chosen = spread(range(n), fraction)
    assert len(chosen) == len(set(chosen)) == kept
    assert chosen == sorted(chosen) and all(0 <= i < n for i in chosen)
    assert fraction < 1 or chosen == [*range(n)]
