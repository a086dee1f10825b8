"""Multi-token prediction: targets and loss against a loop, and learning to draft."""

from __future__ import annotations

import pytest
import torch
from tests.support.models.initialization import draw_zeros
from tests.support.models.initialization import generator as gen
from tests.support.tiny import decoder_config
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models import Transformer
from whorl.models.multi_token import MultiTokenPrediction, multi_token_loss, shift_targets
from whorl.train.learner.learner import Learner
from whorl.train.learner.loop import train_loop
from whorl.train.learner.update import Update, all_adamw


def heads() -> MultiTokenPrediction:
    return draw_zeros(MultiTokenPrediction(16, 3, 2, generator=gen()))


# Two rows of 8. The first has documents of 2, 3 and 3 tokens; the third repeats the first's segment id. The second has one
# document that begins with a prompt of two tokens (no targets) and ends in padding.
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 0, 0]])
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, -1, -1]])
TARGETS = torch.tensor([[2, 0, 4, 5, 0, 7, 8, 0], [10, 11, 12, 13, 14, 0, 0, 0]])
MASK = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0]]).bool()


HIDDEN, OUTPUT = torch.randn(2, 8, 16, generator=gen(1)), torch.randn(15, 16, generator=gen(2))


def allowed(row: int, t: int, ahead: int) -> int | None:
    """Return the target of position t at distance `ahead`, or None, from the documents as lists."""
    documents = ([[1, 2], [3, 4, 5], [6, 7, 8]], [[9, 10, 11, 12, 13, 14]])[row]
    prompt = {10}
    token = int(TOKENS[row, t])
    for document in documents:
        if token in document and document.index(token) + ahead < len(document):
            found = document[document.index(token) + ahead]
            return None if found in prompt else found
    return None


@pytest.mark.parametrize("ahead", [1, 2, 3, 5, 7, 8, 30])
def test_shift_targets_stay_in_document(ahead: int) -> None:
    targets, mask = shift_targets(TARGETS, MASK, SEGMENTS, ahead)
    for row in range(2):
        for t in range(8):
            found = int(targets[row, t]) if mask[row, t] else None
            assert found == allowed(row, t, ahead), (row, t)


def test_shift_targets_without_segments() -> None:
    ids = torch.arange(7)[None]
    targets, mask = shift_targets(ids[:, 1:], torch.ones(1, 6, dtype=torch.bool), None, 3)
    assert targets[0, :4].tolist() == [3, 4, 5, 6] and mask.tolist() == [[True] * 4 + [False] * 2]


def test_multi_token_loss_sums_heads_and_positions() -> None:
    model = heads()
    hidden, output = HIDDEN.clone().requires_grad_(), OUTPUT.clone().requires_grad_()
    loss = multi_token_loss(model, hidden, output, TARGETS, MASK, SEGMENTS)
    want, counts = torch.zeros(()), [0, 0, 0]
    for i, h in enumerate(model(hidden, segments=SEGMENTS)):
        for row in range(2):
            for t in range(8):
                target = allowed(row, t, i + 1)
                if target is not None:
                    want = want - F.log_softmax(h[row, t] @ output.t(), dim=0)[target]
                    counts[i] += 1
    torch.testing.assert_close(loss.total, want)
    assert [float(loss.metrics[f"count_{i}"]) for i in (1, 2, 3)] == counts and loss.count == sum(counts)
    torch.testing.assert_close(sum(loss.metrics[f"nll_{i}"] for i in (1, 2, 3)), want.detach())
    inputs = [hidden, output, *model.parameters()]
    found, expected = torch.autograd.grad(loss.total, inputs), torch.autograd.grad(want, inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert all(gradient.any() for gradient in found)


def test_heads_are_causal_and_stay_in_document() -> None:
    model = heads()
    for out, part in zip(model(HIDDEN), model(HIDDEN[:, :5]), strict=True):
        torch.testing.assert_close(out[:, :5], part)
    packed = model(HIDDEN, torch.arange(8) % 4, torch.arange(8).expand(2, -1) // 4)
    for out, second in zip(packed, model(HIDDEN[:, 4:]), strict=True):
        torch.testing.assert_close(out[:, 4:], second, atol=1e-5, rtol=1e-4)


def test_draft_with_states_equals_draft_from_all() -> None:
    model = heads()
    for cuts in ([1] * 8, [1, 3, 4]):
        states = model.new_state(2, 8)
        done = 0
        for piece in HIDDEN.split(cuts, dim=1):
            done += piece.shape[1]
            drafted = model.draft(piece, OUTPUT, states=states)
            assert torch.equal(drafted, model.draft(HIDDEN[:, :done], OUTPUT))
        assert [state.length for state in states] == [8] * 3


def test_heads_learn_to_draft() -> None:
    """Rows count up in steps of 1 to 4, modulo 11, so two tokens determine the rest."""
    trunk = Transformer(decoder_config(vocab_size=11, n_kv_heads=2, ngram_orders=()), gen())
    ahead = MultiTokenPrediction(32, 3, 2, mlp_hidden=64, generator=gen(1))
    networks = torch.nn.ModuleDict({"trunk": trunk, "heads": ahead})

    def rows(seed: int, n: int = 32) -> Tensor:
        g = gen(seed)
        start, step = torch.randint(0, 11, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
        return (start + step * torch.arange(13)) % 11

    def objective(part: dict[str, Tensor]):  # type: ignore[no-untyped-def]
        ids = part["ids"]
        mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        return multi_token_loss(ahead, trunk(ids[:, :-1]), trunk.head_weight, ids[:, 1:], mask)

    def passes(number: int) -> list[list[dict[str, Tensor]]]:
        return [[{"ids": rows(number)}]]

    learner = Learner(networks, [Update(objective, all_adamw(networks, 3e-3))])  # type: ignore[arg-type]
    train_loop(learner, iter(range(1, 1000)), passes, last=120, lr_scale=lambda s: min(1, (s + 1) / 20))
    test = rows(5000, 200)
    correct = ahead.draft(trunk(test[:, :10]), trunk.head_weight) == test[:, 10:]
    assert correct.shape == (200, 3) and correct.float().mean(dim=0).min() > 0.95


def test_multi_token_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="n is 0"):
        MultiTokenPrediction(16, 0, 2)
    with pytest.raises(ConfigError, match="n_heads is 3"):
        MultiTokenPrediction(16, 2, 3)
    with pytest.raises(ConfigError, match="offset is 4"):
        heads().head(4, HIDDEN)
    with pytest.raises(ConfigError, match="targets is"):
        multi_token_loss(heads(), HIDDEN, OUTPUT, TARGETS[:, :7], MASK)
