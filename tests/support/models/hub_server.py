"""A hub of models on this machine: the part of the API of huggingface.co that `huggingface_hub` calls without xet."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN, SHA = "hf_secret", "a" * 40


class Hub:
    """Repositories: name -> {path: bytes}; objects: LFS files by SHA-256; private: names of private repositories."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.private: set[str] = set()
        self.url = ""


def _answer(hub: Hub, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
    """Return (status, JSON or bytes) of a request."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "objects":
        hub.objects[parts[1]] = body
        return (200, b"") if hashlib.sha256(body).hexdigest() == parts[1] else (400, b"")
    if parts[0] == "verify":
        return 200, {}
    is_api = parts[0] == "api"
    repo = "/".join(parts[2:4] if is_api else parts[:2]).removesuffix(".git")
    if method == "POST" and token != TOKEN:
        return 401, {"error": "Invalid username or password."}
    if parts[:3] == ["api", "repos", "create"]:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        exists = name in hub.repos
        hub.repos.setdefault(name, {})
        if asked.get("private") or asked.get("visibility") == "private":
            hub.private.add(name)
        return (409 if exists else 200), {"url": f"{hub.url}/{name}"}
    if repo not in hub.repos or (repo in hub.private and token != TOKEN):
        return 404, {"error": "Repository not found"}
    files, rest = hub.repos[repo], parts[4:] if is_api else parts[2:]
    if rest[:1] == ["preupload"]:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": modes}
    if rest[:1] == ["info"]:
        objects = []
        for one in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{hub.url}/objects/{one['oid']}"},
                "verify": {"href": f"{hub.url}/verify"},
            }
            objects.append({**one, "authenticated": True, "actions": actions})
        return 200, {"transfer": "basic", "objects": objects}
    if rest[:1] == ["commit"]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = {"commitUrl": f"{hub.url}/{repo}/commit/{SHA}", "commitOid": SHA, "success": True}
        return 200, commit
    if rest[:1] == ["tree"]:
        listed = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        return 200, listed
    if rest[:1] == ["resolve"]:
        name = "/".join(rest[2:])
        return (200, files[name]) if name in files else (404, {"error": "Entry not found"})
    siblings = [{"rfilename": name} for name in files]
    return 200, {
        "_id": "0",
        "id": repo,
        "sha": SHA,
        "private": repo in hub.private,
        "siblings": siblings,
        "tags": [],
    }


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub in a thread; `url` has its address."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self._body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, answer = _answer(hub, self.command, urlsplit(self.path).path, body, token)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if status == 404:
                self.send_header(
                    "X-Error-Code", "EntryNotFound" if "Entry" in str(answer) else "RepoNotFound"
                )
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_HEAD = do_POST = do_PUT = respond

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
