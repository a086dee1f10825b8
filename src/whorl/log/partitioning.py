"""The partition of a key, as Kafka's Java client chooses it, so that producers in any language agree.

murmur2 is by Austin Appleby; seed and shifts are those of `org.apache.kafka.common.utils.Utils.murmur2`.
"""

from __future__ import annotations

_M, _SEED, _MASK = 0x5BD1E995, 0x9747B28C, 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Return the hash as an unsigned number of 32 bits."""
    length = len(data)
    h = _SEED ^ length
    for start in range(0, length & ~3, 4):
        k = int.from_bytes(data[start : start + 4], "little") * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    if rest := data[length & ~3 :]:
        h = (h ^ int.from_bytes(rest, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


def partition_of(key: str, partitions: int) -> int:
    """Return the partition of a key, 0 to partitions - 1."""
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
