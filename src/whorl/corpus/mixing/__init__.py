"""Mixtures: which share of training each group of documents has, and the files that a token stream reads by it."""

from whorl.corpus.mixing.mixture import MIXTURE_FILE, CorpusMixture, MixConfig, MixtureGroup, make_mixture
from whorl.corpus.mixing.shares import mean_shares, mixture_shares

__all__ = [
    "MIXTURE_FILE",
    "CorpusMixture",
    "MixConfig",
    "MixtureGroup",
    "make_mixture",
    "mean_shares",
    "mixture_shares",
]
