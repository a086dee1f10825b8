"""Content-addressed artifacts: made once, found by what they are made from, checked before they are used."""

from whorl.store.artifact import Artifact
from whorl.store.build import Build
from whorl.store.store import Garbage, Store

__all__ = ["Artifact", "Build", "Garbage", "Store"]
