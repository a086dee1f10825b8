"""Artifacts under addresses that are hashes of their inputs: built once, found by lookup, checked before use."""

from whorl.store.address import user_path
from whorl.store.artifact import Artifact
from whorl.store.build import Build
from whorl.store.store import Garbage, Store

__all__ = ["Artifact", "Build", "Garbage", "Store", "user_path"]
