"""Calls between the process of the tests and the process of an untrusted program (see `peer.py`)."""
