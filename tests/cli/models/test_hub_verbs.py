"""`whorl push` and `whorl pull` against a hub on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cli import refuse, succeed
from tests.support.models.hub_server import TOKEN, Hub, running_hub
from tests.support.tiny import make_byte_tokenizer, make_decoder

from whorl.models import load_model
from whorl.models.exchange import export_model
from whorl.store import Store

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a tiny decoder in its store."""
    export_model(make_decoder(trained_length=32), tmp_path / "model", "whorl")
    make_byte_tokenizer().save(tmp_path / "model")
    succeed(tmp_path, "import", "model")
    return tmp_path


def test_pushed_model_is_pulled_unchanged(home: Path, hub: Hub) -> None:
    done = succeed(home, "push", "model", "me/my-model", "--private", "--endpoint", hub.url)
    assert done.stdout == f"{hub.url}/me/my-model\n" and hub.private == {"me/my-model"}
    files = hub.repos["me/my-model"]
    assert {"config.json", "model.safetensors", "modeling_whorl.py", "tokenizer.json"} <= files.keys()
    assert len(hub.objects) == 1 and b"TemplateProcessing" in files["tokenizer.json"]
    old = {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    files |= dict.fromkeys((*old, "README.md"), b"{}")
    succeed(home, "push", "model", "me/my-model", "--dtype", "bfloat16", "--endpoint", hub.url)  # exists
    assert "README.md" in files and not old & files.keys()
    succeed(home, "push", "model", "me/other", "--endpoint", hub.url)
    assert len(hub.objects) == 2 and hub.private == {"me/my-model"}

    files |= {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "original/x.safetensors": b"x"}
    printed = succeed(home, "pull", "me/other", "--endpoint", hub.url).stdout
    assert "whorl sample imported/other" in printed
    succeed(home, "pull", "me/my-model", "--name", "mine", "--endpoint", hub.url)
    names = [path.name for path in (home / "hf").rglob("*.*")]
    assert "tokenizer.json" in names and not {
        "evil.py",
        "pytorch_model.bin",
        "modeling_whorl.py",
        "x.safetensors",
    } & set(names)
    store = Store(home / ".whorl")
    back, rounded = (load_model(store.open(name).path) for name in ("other", "mine"))
    sent = load_model(store.open("imported/model").path)
    torch.testing.assert_close(back.state_dict(), sent.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(rounded.state_dict(), sent.state_dict(), atol=1e-2, rtol=1e-2)


CASES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no such repository": (("pull", "me/nothing"), 2, "there is no repository me/nothing at"),
    "invalid name": (("pull", "a/b/c"), 2, "expected: USER/NAME"),
    "no model": (("pull", "me/empty"), 2, "contains no model"),
    "no such artifact": (("push", "nothing", "me/x"), 1, "nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_hub_verbs_refuse(case: str, home: Path, hub: Hub) -> None:
    words, code, message = CASES[case]
    hub.repos["me/empty"] = {"README.md": b"", "notes.txt": b"none"}
    assert message in refuse(home, *words, "--endpoint", hub.url, code=code)


def test_hub_without_token_network_or_library(home: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    away: Any = {"code": 1}
    assert "cannot be reached" in refuse(
        home, "push", "model", "me/x", "--endpoint", "http://127.0.0.1:9", **away
    )
    assert "cannot be reached" in refuse(home, "pull", "me/x", "--endpoint", "http://127.0.0.1:9", **away)
    succeed(home, "quantize", "model", "--name", "small")
    assert "the model is quantized" in refuse(home, "push", "small", "me/small", "--endpoint", hub.url)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    printed = refuse(home, "push", "model", "me/x", "--endpoint", hub.url)
    assert "refuses access" in printed and "hf auth login" in printed and not hub.repos
    monkeypatch.delenv("HF_TOKEN")
    hub.repos["me/secret"], hub.private = {}, {"me/secret"}
    assert "or it is private" in refuse(home, "pull", "me/secret", "--endpoint", hub.url)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'whorl[hub]'" in refuse(home, "push", "model", "me/x")
