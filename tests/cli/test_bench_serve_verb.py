"""`whorl bench-serve` against a small server on a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli import invoke, refuse, succeed


class Handler(BaseHTTPRequestHandler):
    """Sends max_tokens tokens; answers 400 to prompts with the word "wrong"."""

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.send(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self.send(json.dumps({"tokens": list(body["prompt"].encode())}))
        elif "wrong" in str(body["prompt"]):
            self.send('{"error": {"message": "no such word"}}', status=400)
        else:
            n = body["max_tokens"]
            events = [{"choices": [{"text": "x", "finish_reason": None}]}] * (n - 1)
            events.append({"choices": [{"text": "x", "finish_reason": "length"}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
            lines = [*map(json.dumps, events), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
            self.send("".join(f"data: {line}\n\n" for line in lines), "text/event-stream")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/"
        server.shutdown()


def test_bench_serve_measures_and_stores_loads(url: str, tmp_path: Path) -> None:
    lengths = ("--input-length", "uniform:4,20", "--output-length", 6, "--prefix", "8:2")
    written = ("--save", "all.jsonl", "--page", "load.html", "--slo-ttft", 60, "--cost-per-hour", 2)
    output = succeed(tmp_path, "bench-serve", url, "--rates", "200,1000", "-n", 12, *lengths, *written).output
    assert "1000/s" in output and "time to first token" in output and "100%" in output
    entries = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    loads = [entry for entry in entries if entry["kind"] == "load"]
    assert len(entries) == 26 and [load["output_tokens"] for load in loads] == [72, 72]
    assert all(12 <= e["prompt_tokens"] <= 28 for e in entries if e["kind"] == "request")
    assert (tmp_path / "load.html").read_text().startswith("<!doctype html>")


def test_bench_serve_prints_json(url: str, tmp_path: Path) -> None:
    words = ("--concurrency", "1,4", "-n", 5, "--output-length", 3, "--json", "--warm-up", 0)
    output = succeed(tmp_path, "bench-serve", url, *words).output
    loads = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [load["concurrency"] for load in loads] == [1, 4]
    assert all(load["finished"] == 5 and load["offered_rate"] is None for load in loads)


def test_bench_serve_counts_errors(url: str, tmp_path: Path) -> None:
    words = ("bench-serve", url, "--rate", 500, "-n", 4, "--prompts", "p.txt", "--output-length", 2)
    (tmp_path / "p.txt").write_text("good\nwrong\n")
    output = succeed(tmp_path, *words).output
    assert "{'http 400': 2}" in output and "no such word" in output
    (tmp_path / "p.txt").write_text("wrong\n")
    assert "no request succeeded" in refuse(tmp_path, *words)


@pytest.mark.parametrize(
    "words",
    [
        "ftp://x", "--rate 1 --rates 1,2", "--rates 1,x", "--rate 0", "--rate nan", "--input-length 0", "--prefix x",
        "--prefix -3", "--extra [1]", "--prompts /none.txt", "--text /none.txt", "--burstiness 0",
    ],
)  # fmt: skip
def test_bench_serve_refuses_invalid_options(words: str, tmp_path: Path) -> None:
    result = invoke(tmp_path, "bench-serve", *words.split())
    assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), result.output
