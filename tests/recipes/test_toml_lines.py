"""Line numbers of TOML keys; the scan finds the same keys as the TOML parser."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from whorl.recipes.toml_lines import key_lines, line_of

TEXT = '''\
name = "x"

[steps.ingest]   # a comment
sources = ["a = 1"]
[steps."cu-rate"]
query = """
SELECT x
fake = 1
[steps.fake]
"""
parents = {documents = "ingest"}
a.b = 1
'''


def test_key_lines_skip_multiline_strings() -> None:
    lines = key_lines(TEXT)
    assert lines["name",] == 1
    assert lines["steps", "ingest"] == 3 and lines["steps", "ingest", "sources"] == 4
    assert lines["steps", "cu-rate", "query"] == 6 and lines["steps", "cu-rate", "parents"] == 11
    assert lines["steps", "cu-rate", "a", "b"] == 12
    assert not any("fake" in path for path in lines)
    assert line_of(lines, "steps", "ingest", "absent") == 3 and line_of(lines, "nowhere") == 1


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
