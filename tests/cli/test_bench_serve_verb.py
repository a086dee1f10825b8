"""`whorl bench-serve` against a small server on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whorl.cli import build_app


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send max_tokens tokens; answer 400 to prompts with the word "wrong"."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = next(
                (int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("content-length")), 0
            )
            body = json.loads(await reader.readexactly(size) or b"{}")
            path = head.split()[1]
            status, kind, out = 200, "application/json", b""
            if path == "/v1/models":
                out = json.dumps({"data": [{"id": "m"}]}).encode()
            elif path == "/tokenize":
                out = json.dumps({"tokens": list(body["prompt"].encode())}).encode()
            elif "wrong" in str(body.get("prompt")):
                status, out = 400, b'{"error": {"message": "no such word"}}'
            else:
                kind, n = "text/event-stream", body["max_tokens"]
                for i in range(n):
                    choice = {"text": "x", "finish_reason": "length" if i == n - 1 else None}
                    out += b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
                out += (
                    b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
                )
            writer.write(
                f"HTTP/1.1 {status} .\r\ncontent-type: {kind}\r\ncontent-length: {len(out)}\r\n\r\n".encode()
            )
            writer.write(out)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), list[int]()

    async def serve() -> None:
        server = await asyncio.start_server(_respond, "127.0.0.1", 0)
        port.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run_loop() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{port[0]}/v1/"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def run_bench(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["bench-serve", *words])
    return result.exit_code, result.output


def test_bench_serve_measures_and_stores_loads(url: str, tmp_path: Path) -> None:
    saved, page = tmp_path / "all.jsonl", tmp_path / "load.html"
    code, output = run_bench(
        url, "--rates", "200,1000", "-n", "12", "--input-length", "uniform:4,20", "--output-length", "6", "--slo-ttft", "60",
        "--cost-per-hour", "2", "--save", str(saved), "--page", str(page), "--prefix", "8:2",
    )  # fmt: skip
    assert code == 0, output
    assert "1000/s" in output and "time to first token" in output and "100%" in output
    entries = [json.loads(line) for line in saved.read_text().splitlines()]
    loads = [entry for entry in entries if entry["kind"] == "load"]
    assert len(entries) == 26 and [load["output_tokens"] for load in loads] == [72, 72]
    assert all(12 <= e["prompt_tokens"] <= 28 for e in entries if e["kind"] == "request")
    assert page.read_text().startswith("<!doctype html>")


def test_bench_serve_prints_json(url: str) -> None:
    code, output = run_bench(
        url, "--concurrency", "1,4", "-n", "5", "--output-length", "3", "--json", "--warm-up", "0"
    )
    loads = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert code == 0 and [load["concurrency"] for load in loads] == [1, 4]
    assert all(load["finished"] == 5 and load["offered_rate"] is None for load in loads)


def test_bench_serve_counts_errors(url: str, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("good\nwrong\n")
    code, output = run_bench(url, "--rate", "500", "-n", "4", "--prompts", str(file), "--output-length", "2")
    assert code == 0 and "{'http 400': 2}" in output and "no such word" in output
    file.write_text("wrong\n")
    code, output = run_bench(url, "--rate", "500", "-n", "2", "--prompts", str(file), "--output-length", "2")
    assert code != 0


@pytest.mark.parametrize(
    "words",
    [
        "ftp://x", "--rate 1 --rates 1,2", "--rates 1,x", "--rate 0", "--rate nan", "--input-length 0", "--prefix x",
        "--prefix -3",
        "--extra [1]", "--prompts /none.txt", "--text /none.txt", "--burstiness 0",
    ],
)  # fmt: skip
def test_bench_serve_refuses_invalid_options(words: str) -> None:
    code, output = run_bench(*words.split())
    assert code not in (0, 1) or "Traceback" not in output
    assert code != 0
