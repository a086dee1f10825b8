"""Responses of our engine: equal to the training forward, with errors as missing responses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.evals.hf_folders import make_folder, sentences

from whorl.errors import ConfigError
from whorl.evals.model import engine_backend
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)
from whorl.evals.model.windows import strided_windows
from whorl.train.determinism import deterministic


def answers(backend: EngineBackend, requests: list[Request]) -> list[Response]:
    found: dict[int, Response] = {}

    def keep(n: int, response: Response) -> None:
        assert n not in found
        found[n] = response

    backend.respond(requests, keep)
    assert not backend.engine.sequences()
    return [found[n] for n in range(len(requests))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), "gpt2")


@pytest.fixture(scope="module")
def backend(folder: Path) -> EngineBackend:
    return EngineBackend.open(folder, batch_size=8)


def forward(backend: EngineBackend, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [n - 1] of ids[1:]."""
    model = backend.engine.model
    with torch.no_grad():
        log_probs = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    return log_probs[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_long_prompt_loses_its_beginning_and_keeps_half_of_the_window(backend: EngineBackend) -> None:
    length = backend.max_length or 0
    prompt = " ".join(sentences(length, seed=1))
    n = len(backend.encoder.encode_context(prompt))
    found = answers(
        backend, [GenerateRequest(prompt, m) for m in (4, 10 * length)] + [GenerateRequest("The", 4)]
    )
    few, many, short = (r for r in found if isinstance(r, Completion))
    assert few.n_cut == n - length + 4 and many.n_cut == n - length + length // 2 and short.n_cut == 0
    assert len(many.ids) <= length // 2


def test_scores_equal_the_forward_in_order_of_requests(backend: EngineBackend) -> None:
    texts = sentences(12, seed=5)
    requests: list[Request] = [
        ScoreRequest(f"{texts[n // 3]} {texts[n % 5]}", f" {texts[n % 4]}") for n in range(36)
    ] + [ScoreRequest("", "The dog")]
    for request, response in zip(requests, answers(backend, requests), strict=True):
        assert isinstance(request, ScoreRequest) and isinstance(response, Score) and response.n_cut == 0
        [pair] = backend.encoder.encode_pairs([(request.context, request.continuation)])
        want = forward(backend, pair.context + pair.continuation)[len(pair.context) - 1 :]
        assert response.ids == tuple(pair.continuation) and response.n_context == len(pair.context)
        torch.testing.assert_close(torch.tensor(response.log_probs), want, atol=1e-4, rtol=0)


def test_greedy_continuation_is_recognized(backend: EngineBackend) -> None:
    [made] = answers(backend, [GenerateRequest("The red dog", max_tokens=5)])
    assert isinstance(made, Completion) and len(made.ids) == 5 and made.finish == "length"
    context = backend.encoder.encode_context("The red dog")
    build = backend._score(context, made.ids)
    assert not isinstance(build, Missing)
    [delta] = list(backend.engine.stream(build[0]))
    score = build[1]([delta])
    assert isinstance(score, Score) and score.greedy
    torch.testing.assert_close(torch.tensor(score.log_probs), torch.tensor(made.log_probs), atol=1e-4, rtol=0)


def test_long_context_loses_its_beginning(backend: EngineBackend) -> None:
    context = " ".join(sentences(40))
    [response] = answers(backend, [ScoreRequest(context, " the dog")])
    [pair] = backend.encoder.encode_pairs([(context, " the dog")])
    assert isinstance(response, Score) and backend.max_length == 128
    assert response.n_context + len(response.ids) == 129
    assert response.n_cut == len(pair.context) - response.n_context > 0
    want = forward(backend, (pair.context + pair.continuation)[-129:])[-len(pair.continuation) :]
    torch.testing.assert_close(torch.tensor(response.log_probs), want, atol=1e-4, rtol=0)


def test_text_is_scored_once_in_strided_windows(backend: EngineBackend) -> None:
    text = " ".join(sentences(30))
    [response] = answers(backend, [TextRequest(text, window=40, stride=15)])
    ids = backend.encoder.encode_document(text)
    assert isinstance(response, Score) and response.ids == tuple(ids[1:])
    want = []
    for w in strided_windows(len(ids), 40, 15):
        want += forward(backend, ids[w.start : w.stop])[w.first - w.start - 1 :].tolist()
    torch.testing.assert_close(torch.tensor(response.log_probs), torch.tensor(want), atol=1e-4, rtol=0)


def test_windows_score_each_id_once_with_context() -> None:
    for n, length, stride in ((1, 4, 2), (2, 4, 4), (5, 4, 4), (17, 6, 4), (30, 7, 1), (9, 8, 3)):
        for fill in (True, False):
            windows = list(strided_windows(n, length, stride, fill_last=fill))
            assert [i for w in windows for i in range(w.first, w.stop)] == list(range(1, n))
            for w in windows:
                assert w.stop - w.start <= length + 1 and w.first - w.start >= min(
                    w.first, length - stride + 1
                )
    with pytest.raises(ConfigError, match="stride is 5 and window 4"):
        list(strided_windows(9, 4, 5))


def test_stop_strings_seeds_and_chat(backend: EngineBackend) -> None:
    free = answers(backend, [GenerateRequest("The red dog", max_tokens=30)])[0]
    assert isinstance(free, Completion)
    stop = free.text[6:8]
    messages = ({"role": "user", "content": "The red dog?"},)
    requests: list[Request] = [
        GenerateRequest("The red dog", max_tokens=30, stop=(stop,)),
        GenerateRequest("The red dog", max_tokens=30, temperature=1.0, seed=1),
        GenerateRequest("The red dog", max_tokens=30, temperature=1.0, seed=1),
        GenerateRequest("The red dog", max_tokens=30, temperature=1.0, seed=2),
        GenerateRequest(messages, max_tokens=4),
    ]
    cut, one, same, other, chat = answers(backend, requests)
    assert isinstance(cut, Completion) and cut.finish == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert one == same != other
    assert isinstance(chat, Completion)


def test_what_cannot_be_answered_is_missing(backend: EngineBackend) -> None:
    requests: list[Request] = [
        ScoreRequest("The dog", " runs"), ScoreRequest("The dog", ""),
        ScoreRequest("The dog \ud800", " runs"), ScoreRequest("The dog", " runs" * 200), TextRequest(""),
        GenerateRequest("\ud800"),
    ]  # fmt: skip
    good, *bad = answers(backend, requests)
    assert isinstance(good, Score)
    reasons = [response.reason for response in bad if isinstance(response, Missing)]
    for reason, expected in zip(
        reasons,
        ("no ids of its own", "holds '\\ud800'", "the model reads 128", "no ids", "holds"),
        strict=True,
    ):
        assert expected in reason


def test_nan_log_probs_are_missing(folder: Path) -> None:
    backend = EngineBackend.open(folder, batch_size=2)
    with torch.no_grad():
        next(iter(backend.engine.model.parameters())).fill_(float("nan"))
    backend.engine.runner.refresh()
    made = answers(backend, [ScoreRequest("The dog", " runs"), GenerateRequest("The dog")])
    assert [type(response) for response in made] == [Missing, Missing]
    assert isinstance(made[0], Missing) and "NaN" in made[0].reason


def test_wordpiece_scores_and_does_not_generate(tmp_path: Path) -> None:
    backend = EngineBackend.open(make_folder(tmp_path, "wordpiece"), batch_size=2)
    score, text = answers(backend, [ScoreRequest("The dog", " runs"), GenerateRequest("The dog")])
    assert isinstance(score, Score) and isinstance(text, Missing) and "does not spell bytes" in text.reason


def test_address_follows_files_and_settings(folder: Path) -> None:
    address = EngineBackend.open(folder).address
    assert EngineBackend.open(folder, batch_size=3).address == address
    assert EngineBackend.open(folder, dtype="bfloat16").address != address
    assert EngineBackend.open(folder, max_length=64).address != address
    config = folder / "generation_config.json"
    before = config.read_text()
    config.write_text(before + " ")
    assert EngineBackend.open(folder).address != address
    config.write_text(before)


def test_healed_prompt_continues_its_last_token(tmp_path: Path) -> None:
    backend = EngineBackend.open(make_folder(tmp_path / "m", "whorl"), batch_size=2)
    plain, healed = (GenerateRequest("the red do", max_tokens=6, heal=heal) for heal in (False, True))
    assert all(isinstance(response, Completion) for response in answers(backend, [plain, healed]))
    one, other = (backend._generate(request)[0][0] for request in (plain, healed))  # type: ignore[index]
    assert one.forced_prefix == b"" and other.forced_prefix and b"the red do".endswith(other.forced_prefix)
    assert one.ids[: len(other.ids)] == other.ids


def test_free_memory_decides_no_bit_of_deterministic_scores(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the cache decides which requests share a batch."""

    def pages(free: int) -> int:
        memory = SimpleNamespace(total=1 << 40, available=free)
        monkeypatch.setattr(engine_backend.psutil, "virtual_memory", lambda: memory)
        return EngineBackend.open(folder, batch_size=8).engine.config.kv_cache_tokens

    assert pages(1 << 18) < pages(1 << 40)
    with deterministic():
        assert pages(1 << 18) == pages(1 << 40)
