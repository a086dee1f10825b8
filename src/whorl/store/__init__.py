"""Content-addressed artifacts: built once, found by the hash of their inputs, checked before use."""

from whorl.store.artifact import Artifact
from whorl.store.build import Build
from whorl.store.store import Garbage, Store

__all__ = ["Artifact", "Build", "Garbage", "Store"]
