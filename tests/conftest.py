"""Fixtures that all rooms share. Session-scoped objects are read-only: copy a model before training or editing it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from whorl.models.transformer import Transformer
    from whorl.store import Store
    from whorl.tokens.tokenizer import Tokenizer

# Tests measure and choose kernels for tiny models, in a cache of their own. It lasts: compiled kernels are kept in it.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
if _CACHE.parts[-2:] != ("whorl", "tests"):  # as inherited by the workers of xdist
    os.environ["XDG_CACHE_HOME"] = str(_CACHE / "whorl" / "tests")

# A property is tried with 50 examples, other ones in each run; a busy machine may take long over one of them.
hypothesis.settings.register_profile("whorl", max_examples=50, deadline=None)
hypothesis.settings.load_profile("whorl")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that use a module's fixture, so that one worker sets it up once (`--dist loadgroup`)."""
    for item in items:
        fixtures = vars(item)["_fixtureinfo"].name2fixturedefs.values()
        shares = any(definitions[-1].scope == "module" for definitions in fixtures)
        if shares and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a pytest with which pytest-xdist groups nothing and says nothing (3.8.0 does not know 9.2's node ids)."""
    groups = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and not all("@" in name for name in groups):
        raise pytest.UsageError(
            "pytest-xdist does not group tests with this pytest: install pytest below 9.2"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the imported modules and the collected tests from garbage collection, which took a third of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restore torch's number of threads, which commands set: it decides the last bits of later tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def torch_kernels() -> Iterator[None]:
    """Forget the kernels that a test has chosen for shapes, which later tests of its worker may have too."""
    yield
    if (library := sys.modules.get("whorl.nn.cpu.library")) is not None:
        library.clear_choices()


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """Fail a test that leaves a setting of Whorl in the environment, where it decides later tests of its worker.

    The code that data may name is withdrawn: recipes and commands permit it for the rest of their process.
    """
    before = _settings()
    yield
    os.environ.pop("WHORL_CODE", None)
    if "WHORL_CODE" in before:
        os.environ["WHORL_CODE"] = before["WHORL_CODE"]
    assert _settings() == before, "restore os.environ, with monkeypatch for one"


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("WHORL_")}


@pytest.fixture(scope="session")
def tiny_decoder() -> Transformer:
    """A `whorl_decoder` over bytes: 2 layers, width 32, in eval mode. `tests.support.tiny` makes variants."""
    from tests.support.tiny import make_decoder

    return make_decoder().eval()


@pytest.fixture(scope="session")
def tiny_transformer() -> Transformer:
    """A `Transformer` over bytes: 2 layers, width 32, rotary attention, in eval mode."""
    from tests.support.tiny import make_transformer

    return make_transformer().eval()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 bytes and the special tokens; its ids fit `tiny_decoder` and `tiny_transformer`."""
    from tests.support.tiny import make_byte_tokenizer

    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def token_shards(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """A folder with the shards of 60 documents of doubled letters (`train`, `validation`) and the byte tokenizer."""
    from tests.support.tiny import write_token_shards

    return write_token_shards(tmp_path_factory.mktemp("token_shards"), byte_tokenizer)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray on this machine, for all tests of the group `ray`, which one worker runs."""
    ray = pytest.importorskip("ray")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    with pytest.MonkeyPatch().context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000,
            runtime_env={"env_vars": {"PYTHONPATH": paths, "WHORL_CHOOSE": "cpu=torch"}},
        )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    from whorl.store import Store

    return Store(tmp_path / "store")
