"""Line numbers of TOML keys; the scan finds the same keys as the TOML parser."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from whorl.recipes.toml_lines import key_lines

names = st.from_regex(r"[a-z][a-z0-9_-]{0,5}", fullmatch=True)
values = st.sampled_from(["1", '"text = 2"', "[1, 2]", '"""\nx = 1\n[y]\n"""', "'''q'''", "true", "{in = 1}"])


@given(st.dictionaries(names, st.dictionaries(names, values, max_size=4), min_size=1, max_size=4))
def test_key_lines_agree_with_tomllib(tables: dict[str, dict[str, str]]) -> None:
    text, expected = "", {}
    for table, entries in tables.items():
        text += f"\n[{table}]\n"
        expected[table,] = text.count("\n")
        for key, value in entries.items():
            expected[table, key] = text.count("\n") + 1
            text += f"{key} = {value}\n"
    read = tomllib.loads(text)
    assert {key: read[key].keys() for key in read} == {key: tables[key].keys() for key in tables}
    assert key_lines(text) == expected
