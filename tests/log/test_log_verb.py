"""`whorl log`: what each verb prints, and its errors."""

from __future__ import annotations

import json

import pytest
from tests.support import cli

from whorl.log import Event, TopicConfig, open_log


def succeed(tmp_path, *words):
    return cli.succeed(tmp_path, "log", *words)


@pytest.fixture
def url(tmp_path):
    found = f"sqlite:{tmp_path / 'store' / 'log' / 'events.db'}"
    with open_log(found) as log:
        log.create("feedback", TopicConfig(partitions=2, retention_records=3))
        log.append(
            "feedback",
            *(Event("feedback.given", f"actor {i}", {"n": i, "sealed": "c2Vj"}) for i in range(20)),
        )
        log.append("feedback", Event("actor.erased", "actor 3", None))
        log.create("other")
        with log.group("counts", ["feedback"]) as reader:
            reader.read(limit=1000)
            reader.commit()
    return found


def test_info_shows_topics_groups_and_guarantees(url, tmp_path):
    text = succeed(tmp_path, "info", "--store", str(tmp_path / "store")).stdout
    assert "survives    kill -9 and power failure" in text
    assert [line.split()[:4] for line in text.splitlines() if line.startswith(("feedback", "other", "counts"))] == [
        ["feedback", "2", "21", "21"], ["other", "4", "0", "0"], ["counts", "feedback", "0"],
    ]  # fmt: skip
    assert "retention_records=3" in text


def test_tail_hides_sealed_text_and_replay_prints_whole_records(url, tmp_path):
    lines = succeed(tmp_path, "tail", "feedback", "-n", "2", "--log", url).stdout.splitlines()
    assert len(lines) == 4 and all("c2Vj" not in line for line in lines)
    assert any("sealed=sealed" in line for line in lines)
    rows = [
        json.loads(line) for line in succeed(tmp_path, "replay", "feedback", "--log", url).stdout.splitlines()
    ]
    assert sorted(row["event"]["data"]["n"] for row in rows if row["event"]["data"]) == [*range(20)]
    assert succeed(tmp_path, "replay", "feedback", "--since", "2100-01-01", "--log", url).stdout == ""
    assert succeed(tmp_path, "replay", "feedback", "--to", "1h", "--log", url).stdout == ""


def test_copy_continues_and_changes_the_number_of_partitions(url, tmp_path):
    target = f"sqlite:{tmp_path / 'wide.db'}"
    with open_log(url) as log:
        log._connection().execute("UPDATE records SET value = x'ff' WHERE partition = 0 AND \"offset\" = 1")
    first = succeed(tmp_path, "copy", url, target, "--topic", "feedback", "--partitions", "8")
    assert "feedback: 21 records read, 20 new, 1 unreadable" in first.stdout
    assert "left out: feedback/0, offset 1" in first.stderr
    assert "20 new" not in succeed(tmp_path, "copy", url, target, "--topic", "feedback").stdout
    with open_log(target) as log:
        assert log.topic("feedback") == TopicConfig(partitions=8, retention_records=3)
        assert len(list(log.replay("feedback"))) == 20
    assert "4 partitions has 8" in cli.refuse(tmp_path, "log", "copy", url, target, "--partitions", "4")


def test_trim_applies_the_settings(url, tmp_path):
    assert "feedback: 15 offsets removed" in succeed(tmp_path, "trim", "feedback", "--log", url).stdout


def test_a_wrong_log_or_time_is_an_error(tmp_path, url):
    assert "there is no log" in cli.refuse(tmp_path, "log", "info", "--log", f"sqlite:{tmp_path / 'none.db'}")
    assert "begins with 'redis'" in cli.refuse(tmp_path, "log", "info", "--log", "redis://x")
    assert "names no file" in cli.refuse(tmp_path, "log", "info", "--log", "sqlite:")
    assert "no topic 'none'" in cli.refuse(tmp_path, "log", "tail", "none", "--log", url)
    assert "the time 'yesterday'" in cli.refuse(
        tmp_path, "log", "replay", "feedback", "--since", "yesterday", "--log", url
    )
    (tmp_path / "text.db").write_text("no database" * 100)
    assert "cannot be opened" in cli.refuse(
        tmp_path, "log", "info", "--log", f"sqlite:{tmp_path / 'text.db'}", code=1
    )
