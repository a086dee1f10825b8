"""Whorl: from a folder of raw bytes to a language model that is trained, measured and explained.

The package is a house of rooms on floors (see README): a room imports from lower floors only. Nothing here
imports torch, so that `whorl --help` answers at once.
"""

__version__ = "0.1.0"
