"""`whorl arena`: a server over endpoints, a judge, the table, the page, exports, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
from tests.support.cli import refuse, succeed
from tests.support.evals.fake_endpoint import FakeEndpoint
from tests.support.evals.votes import votes
from tests.support.tiny import make_byte_tokenizer, make_decoder

from whorl.evals.arena.arena_log import ArenaLog, Battle, BattleTurn
from whorl.models import save_model


def fill(path: Path, n: int) -> None:
    """Append n battles with votes to a log."""
    with ArenaLog(path) as log:
        for v in votes(np.random.default_rng(0), n):
            turn = BattleTurn("Say <b>hi</b>.", "x" * v.left_length, "y" * v.right_length)
            log.add_battle(Battle(v.battle, v.left, v.right, turns=(turn,)))
            log.add_vote(v.battle, v.choice, f"voter {int(v.battle) % 30}")
        log.add_missing("none", "m2", "timed out")


def test_table_page_and_exports_of_a_log(tmp_path: Path) -> None:
    fill(tmp_path / "arena.sqlite", 300)
    printed = succeed(tmp_path, "arena", "table", "--draws", 50).output
    first = printed.splitlines()[1].split()
    assert first[:2] == ["m3", "1"] and "m3 is first with" in printed and "votes reversed" in printed
    succeed(tmp_path, "arena", "export")
    again = succeed(tmp_path, "arena", "table", "votes.jsonl", "--draws", 50).output
    assert again == printed
    record = (tmp_path / "votes.jsonl").read_text().splitlines()[0]
    (tmp_path / "twice.jsonl").write_text(
        "\n".join([record, *(tmp_path / "votes.jsonl").read_text().splitlines()])
    )
    twice = succeed(tmp_path, "arena", "table", "twice.jsonl", "--draws", 50).output
    assert twice == "1 votes were there twice and count once\n" + printed
    assert "length:" in succeed(tmp_path, "arena", "table", "--length", "--draws", 50).output
    succeed(tmp_path, "arena", "page", "--out", "ratings.html", "--draws", 50)
    page = (tmp_path / "ratings.html").read_text()
    for text in ("m3 is first with", "Expected scores", "m2: 1 answers did not arrive", "bootstrap"):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")
    n_pairs = succeed(tmp_path, "arena", "export", "--pairs", "--out", "pairs.jsonl").output.split()[0]
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == int(n_pairs) and pairs[0]["prompt"][0]["content"] == "Say <b>hi</b>."


def test_judge_votes_over_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One fish\nTwo birds\n")
    with FakeEndpoint() as fake:  # repeats the last word of its prompt: the judge's is [[tie]]
        models = (f"a={fake.url}#fake", f"b={fake.url}#fake")
        words = ("arena", "judge", *models, "--prompts", "prompts.txt", "--by", f"{fake.url}#fake", "-n", 6)
        printed = succeed(tmp_path, *words, "--seed", 0).output
    assert "6 votes, 0 battles without a verdict, 0 without an answer" in printed
    with ArenaLog(tmp_path / "arena.sqlite") as log:
        assert [(v.choice, v.voter) for v in log.votes()] == [("tie", "judge:fake")] * 6
        assert {t.left for b in log.battles() for t in b.turns} == {"fish", "birds"}


def test_serve_takes_votes_until_it_is_stopped(tmp_path: Path) -> None:
    with FakeEndpoint() as fake:
        command = [
            sys.executable, "-m", "whorl.cli", "arena", "serve", f"a={fake.url}#fake", f"b={fake.url}#fake",
        ]  # fmt: skip
        with subprocess.Popen(
            [*command, "--port", "0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as server:
            assert server.stderr is not None
            lines = [server.stderr.readline() for _ in range(3)]
            assert lines[0] == "2 models, 0 votes in arena.sqlite\n"
            url = lines[1].split()[1]
            assert "arena.js" in httpx.get(url).text
            battle = httpx.post(f"{url}v1/arena/battles", json={"prompt": "Hello world"}).json()
            assert battle["turns"][0]["left"] == "world"
            vote = httpx.post(
                f"{url}v1/arena/battles/{battle['battle']}/vote", json={"choice": "left"}
            ).json()
            assert vote["left"]["after"] > 1000
            server.send_signal(signal.SIGINT)
            assert server.wait(30) in (0, 130)
    with ArenaLog(tmp_path / "arena.sqlite") as log:
        assert log.n_votes() == 1


def test_wrong_use_has_clear_errors(tmp_path: Path) -> None:
    assert "there is no file arena.sqlite" in refuse(tmp_path, "arena", "table", code=1)
    with ArenaLog(tmp_path / "arena.sqlite"):
        pass
    assert "arena.sqlite has no votes" in refuse(tmp_path, "arena", "table", code=1)
    (tmp_path / "prompts.txt").write_text("One\n")
    done = refuse(
        tmp_path, "arena", "serve", "http://127.0.0.1:9/v1", "b=http://127.0.0.1:9/v1#b", "--port", 0
    )
    assert "has no model" in done and "http://127.0.0.1:9/v1#MODEL" in done
    open_to_all = refuse(tmp_path, "arena", "serve", "a", "b", "--host", "0.0.0.0")
    assert "no keys are required" in open_to_all


def test_local_models_continue_texts(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / f"model{seed}"
        folder.mkdir()
        save_model(make_decoder(seed, n_layers=1, n_heads=1, head_dim=32), folder)
        make_byte_tokenizer().save(folder)
    (tmp_path / "prompts.txt").write_text("def f(\n")
    with FakeEndpoint() as fake:
        words = (
            "--prompts", "prompts.txt", "--by", f"{fake.url}#fake", "-n", 3, "--max-tokens", 8, "--complete",
        )  # fmt: skip
        printed = succeed(tmp_path, "arena", "judge", "model0", "b=model1", *words).output
    assert "3 votes" in printed
    with ArenaLog(tmp_path / "arena.sqlite") as log:
        for battle in log.battles():
            assert {battle.left, battle.right} == {"model0", "b"} and battle.settings["complete"]
            assert battle.addresses[0].startswith("folder-") and len(set(battle.addresses)) == 2
            assert battle.turns[0].left and battle.turns[0].left_finish in ("length", "stop")
