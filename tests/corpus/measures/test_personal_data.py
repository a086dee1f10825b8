"""Masking of personal data and secrets, with counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.corpus.measures.measure import measure_texts
from whorl.corpus.measures.personal_data import mask


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to ann.lee+x@mail.example.org.", "Write to <EMAIL>."),
        ("user@localhost and @name", "user@localhost and @name"),
        ("ping 192.168.1.10, then 8.8.8.8.", "ping <IP>, then <IP>."),
        ("999.1.1.1 is no address", "999.1.1.1 is no address"),
        (
            "version 1.84.1.0 and v1.84.1.0 and foo>=1.84.1.0",
            "version 1.84.1.0 and v1.84.1.0 and foo>=1.84.1.0",
        ),
        ("1.2.3.4.5", "1.2.3.4.5"),
        ("rust 1.84.1.0, or 1.84.1.0", "rust 1.84.1.0, or 1.84.1.0"),
        (
            "10.0.0.0/8 with 255.255.255.0, 127.0.0.1 and 224.0.0.1",
            "10.0.0.0/8 with 255.255.255.0, 127.0.0.1 and 224.0.0.1",
        ),
        ("Chrome/114.0.5735.90 from 203.0.113.9", "Chrome/114.0.5735.90 from <IP>"),
        ("http://203.0.113.9/ and 203.0.113.9:80", "http://<IP>/ and <IP>:80"),
        ("card 4111 1111 1111 1111", "card <CARD>"),
        ("card 4111 1111 1111 1112", "card 4111 1111 1111 1112"),
        ("call +44 20 7946 0958 or (555) 555-0100 or 555-555-0100", "call <PHONE> or <PHONE> or <PHONE>"),
        ("on 2026-11-24 at 10:30, 3.14159265358979", "on 2026-11-24 at 10:30, 3.14159265358979"),
        ("key = AKIA" + "A1B2C3D4E5F6G7H8", "key = <SECRET>"),
        ("token ghp_" + "a1B2" * 9, "token <SECRET>"),
    ],
)
def test_personal_data_is_masked_and_counted(text: str, masked: str) -> None:
    found, counts = mask(text)
    assert found == masked
    assert sum(counts.values()) == sum(found.count(f"<{kind.upper()}>") for kind in counts)
    (row,) = measure_texts("personal_data", [text])
    assert row == {f"n_{kind}": n for kind, n in counts.items()}


@given(st.text())
def test_masking_twice_changes_no_text(text: str) -> None:
    once, _ = mask(text)
    assert mask(once)[0] == once
