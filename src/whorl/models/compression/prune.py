"""Structured pruning: remove attention heads and MLP channels, and adjust the remaining weights.

Heads and channels are groups of input columns of a matrix that writes into the residual stream (`out`, `down`). With that
matrix W and the second moments H of its inputs (`activation_moments.py`), removing group g and refitting the other columns
by least squares costs

    cost(g) = tr(W_g S W_g^T),   S = inv([inv(H)]_gg);     W -= W_g S [inv(H)]_g:,   inv(H) -= [inv(H)]_:g S [inv(H)]_g:

Criterion "obs" is the Optimal Brain Surgeon (Hassibi & Stork 1993) for groups of columns (Kurtic et al. 2023, ZipLM,
arXiv:2302.04089): remove the cheapest group, refit, repeat. Of two redundant channels it keeps one, where a score per
channel (Wanda, arXiv:2306.11695; Minitron, arXiv:2407.14679) keeps or drops both. The baselines have no refit:
"activation" scores by tr(W_g H_gg W_g^T), "magnitude" by the weights alone, and "random" at random.

The result is a model of the same class with a smaller configuration, since every layer loses equally many. Key heads are
removed with their query heads; query heads equally in each group, so grouped-query attention stays valid. Further training
with `teacher_log_probs` and `objectives/distil.py` restores quality.

Subtle point: H is damped, because an input that is always 0 in the text has no curvature and would take any weight.

Shapes: W [out, in]; H [in, in] fp64; groups [n, size] column numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.models.compression.activation_moments import second_moments
from whorl.models.language_model import LanguageModel
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig
from whorl.nn.compiler import meta_device
from whorl.nn.mlp import GATED

PruneCriterion = Literal["obs", "activation", "magnitude", "random"]
DAMPING = 0.01  # relative to the mean of H's diagonal


class OptimalBrainSurgeon:
    """A matrix that removes groups of its input columns.  weight: [out, in]; moments: [in, in] fp64."""

    def __init__(self, weight: Tensor, moments: Tensor, damping: float = DAMPING) -> None:
        self.weight = weight.detach().double().clone()
        h = moments.clone()
        h.diagonal().add_(damping * h.diagonal().mean().clamp(min=1e-12))
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))

    def costs(self, groups: Tensor) -> Tensor:
        """Return the cost of removing each group after refitting the others, [n]."""
        if groups.shape[1] == 1:
            at = groups[:, 0]
            return self.weight[:, at].square().sum(0) / self.inverse.diagonal()[at]
        w = self.weight[:, groups].transpose(0, 1)  # [n, out, size]
        block = self.inverse[groups[:, :, None], groups[:, None, :]]  # [n, size, size]
        solution: Tensor = torch.linalg.solve(block, w.transpose(1, 2))
        return (w.transpose(1, 2) * solution).sum((1, 2))

    def remove(self, group: Tensor) -> None:
        """Remove one group [size]: set its columns to 0 and refit the others."""
        block = self.inverse[group][:, group]
        update = torch.linalg.solve(block, self.inverse[group])  # [size, in]
        self.weight -= self.weight[:, group] @ update
        self.inverse -= self.inverse[:, group] @ update
        self.weight[:, group] = 0.0
        # Decouple the removed columns; 1 keeps their own block invertible.
        self.inverse[group], self.inverse[:, group] = 0.0, 0.0
        self.inverse[group, group] = 1.0


@dataclass(frozen=True)
class PrunedLayer:
    """Kept query heads, key heads and channels of one layer, ascending, and the matrices behind them."""

    heads: Tensor
    kv_heads: Tensor
    channels: Tensor
    out: Tensor
    down: Tensor


def prune(
    model: LanguageModel,
    rows: Sequence[Tensor],
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    mlp_hidden: int | None = None,
    criterion: PruneCriterion = "obs",
    generator: torch.Generator | None = None,
) -> LanguageModel:
    """Return a model of the same class with fewer heads or channels in every layer; `model` is unchanged.

    Args:
        rows: batches of ids [B, T] for the second moments.
        heads, kv_heads, mlp_hidden: number to keep in each layer; None keeps all. Without `kv_heads`, key heads are removed
            with `heads` if each has one query head, and are kept otherwise.
        criterion: see the top of this file; generator: of "random".

    Raises:
        ConfigError: an impossible number, or an unsupported layer (experts, ALiBi, shared keys).
    """
    if criterion not in get_args(PruneCriterion):
        raise ConfigError(f"criterion is {criterion!r}", expected=one_of(criterion, get_args(PruneCriterion)))
    if model.quantization is not None:
        raise ConfigError("the model is quantized", expected="a model in full precision: prune first")
    shapes = [_layer_shape(model, n) for n in range(len(model.blocks))]
    target = _target(model, shapes, heads, kv_heads, mlp_hidden)
    names = [name for n in range(len(model.blocks)) for name in _prunable_weights(model, n) if name]
    moments = second_moments(model, rows, names)
    kept = [
        _select_units(model, n, shape, target, moments, criterion, generator)
        for n, shape in enumerate(shapes)
    ]
    config = _config(model, target)
    with meta_device():
        small = type(model)(config, dtype=model.dtype)
    if any(name not in small.state_dict() for name, _ in small.named_buffers()):
        small = type(model)(config, dtype=model.dtype)
    state = {name: t.detach() for name, t in model.state_dict().items()}
    for n, layer in enumerate(kept):
        _slice_layer(model, n, shapes[n], layer, state)
    small.load_state_dict({name: t.clone().contiguous() for name, t in state.items()}, assign=True)
    return small.to(model.embedding.device).train(model.training).requires_grad_(True)


@torch.inference_mode()
def teacher_log_probs(
    model: LanguageModel, ids: Tensor, top_k: int | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a teacher's predictions after each position.

    Args:
        ids: [B, T].
        top_k: K most likely tokens, in descending order; None: the whole vocabulary in its order.

    Returns:
        (log-probabilities [B, T, K] fp32, their ids [B, T, K]).
    """
    found = model.logits(model(ids, segments=segments)).log_softmax(-1)
    if top_k is None:
        return found, torch.arange(found.shape[-1], device=found.device).expand_as(found)
    values, indices = found.topk(min(top_k, found.shape[-1]), dim=-1)
    return values, indices


@dataclass(frozen=True)
class _LayerShape:
    """Sizes of one layer; n_heads is 0 where no heads can be removed."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_hidden: int


def _layer_shape(model: LanguageModel, n: int) -> _LayerShape:
    c = model.config
    if not isinstance(model, Transformer):
        raise ConfigError(f"a {type(model).__name__} cannot be pruned", expected="a Transformer")
    mixer = c.layer_mixers()[n]
    hidden = 0 if c.has_experts(n) else c.mlp_hidden
    if not isinstance(mixer, AttentionConfig):
        return _LayerShape(0, 0, 0, hidden)
    return _LayerShape(mixer.n_heads, mixer.n_kv_heads, mixer.head_dim, hidden)


def _target(
    model: LanguageModel,
    shapes: list[_LayerShape],
    heads: int | None,
    kv_heads: int | None,
    mlp_hidden: int | None,
) -> _LayerShape:
    """Return the sizes to keep in each layer; 0 keeps all."""
    with_heads = [s for s in shapes if s.n_heads]
    if heads is not None or kv_heads is not None:
        if not with_heads:
            raise ConfigError(
                "heads or kv_heads is given, and no layer has heads", expected="a model with attention heads"
            )
        if len({(s.n_heads, s.n_kv_heads) for s in with_heads}) > 1:
            raise ConfigError(
                "the layers have different numbers of heads", expected="the same number in every layer"
            )
        first = with_heads[0]
        each = first.n_heads // first.n_kv_heads
        heads = (kv_heads or 0) * each if heads is None else heads
        kv_heads = (heads if each == 1 else first.n_kv_heads) if kv_heads is None else kv_heads
        if not 1 <= kv_heads <= first.n_kv_heads:
            raise ConfigError(f"kv_heads is {kv_heads}", expected=f"1 to {first.n_kv_heads}")
        if heads < 1 or heads % kv_heads or heads // kv_heads > each:
            raise ConfigError(
                f"heads is {heads}",
                expected=f"a multiple of kv_heads ({kv_heads}), at most {kv_heads * each}",
            )
        attention = [m for m in model.config.layer_mixers() if isinstance(m, AttentionConfig)]
        if any(m.alibi for m in attention):
            raise ConfigError(
                "heads cannot be removed with alibi",
                expected="positions that do not depend on the number of heads",
            )
        if any(m.qk_norm == "all_heads" for m in attention):
            raise ConfigError(
                'heads cannot be removed with qk_norm = "all_heads"',
                expected="a norm of each head, which does not depend on the others",
            )
        if model.config.kv_sharing_factor > 1 and kv_heads != first.n_kv_heads:
            raise ConfigError(
                "kv_heads cannot be removed: layers share them", expected="kv_sharing_factor = 1"
            )
    if mlp_hidden is not None:
        if not all(s.mlp_hidden for s in shapes):
            raise ConfigError("mlp_hidden cannot shrink in a mixture of experts", expected="plain MLPs")
        if not 1 <= mlp_hidden <= shapes[0].mlp_hidden:
            raise ConfigError(f"mlp_hidden is {mlp_hidden}", expected=f"1 to {shapes[0].mlp_hidden}")
    return _LayerShape(heads or 0, kv_heads or 0, 0, mlp_hidden or 0)


def _prunable_weights(model: LanguageModel, n: int) -> tuple[str, str]:
    """Return the names of the matrices behind heads and channels; "" where none can be pruned."""
    shape = _layer_shape(model, n)
    return (
        f"blocks.{n}.mixer.out" if shape.n_heads else "",
        f"blocks.{n}.mlp.down" if shape.mlp_hidden else "",
    )


def _select_units(
    model: LanguageModel,
    n: int,
    shape: _LayerShape,
    target: _LayerShape,
    moments: dict[str, Tensor],
    criterion: PruneCriterion,
    generator: torch.Generator | None,
) -> PrunedLayer:
    """Select the heads and channels of layer `n` to keep."""
    out_name, down_name = _prunable_weights(model, n)
    nothing = torch.zeros(0, dtype=torch.long)
    heads = kv_heads = channels = nothing
    out = down = torch.zeros(0, 0)
    if out_name:
        weight: Any = model.get_submodule(out_name).weight
        slicer = _Slicer(weight, moments[out_name], criterion, generator)
        each, n_kv = shape.n_heads // shape.n_kv_heads, shape.n_kv_heads
        columns = torch.arange(shape.n_heads * shape.head_dim)
        kv_heads = slicer.keep(columns.view(n_kv, -1), target.n_kv_heads or n_kv)
        per_group = (target.n_heads or shape.n_heads) // len(kv_heads)
        found = []
        for kv in kv_heads.tolist():
            group = torch.arange(kv * each, (kv + 1) * each)
            found.append(group[slicer.keep(columns.view(shape.n_heads, -1)[group], per_group)])
        heads = torch.cat(found)
        out = slicer.weight[:, columns.view(shape.n_heads, -1)[heads].flatten()].to(weight.dtype)
    if down_name:
        weight = model.get_submodule(down_name).weight
        slicer = _Slicer(weight, moments[down_name], criterion, generator)
        channels = slicer.keep(torch.arange(shape.mlp_hidden)[:, None], target.mlp_hidden or shape.mlp_hidden)
        down = slicer.weight[:, channels].to(weight.dtype)
    return PrunedLayer(heads, kv_heads, channels, out, down)


class _Slicer:
    """Removes groups of columns from one matrix by a criterion."""

    def __init__(
        self, weight: Tensor, moments: Tensor, criterion: PruneCriterion, generator: torch.Generator | None
    ) -> None:
        self.surgeon = OptimalBrainSurgeon(weight, moments) if criterion == "obs" else None
        self.plain, self.moments = weight.detach(), moments
        self.criterion, self.generator = criterion, generator

    @property
    def weight(self) -> Tensor:
        return self.plain if self.surgeon is None else self.surgeon.weight

    def keep(self, groups: Tensor, n: int) -> Tensor:
        """Return the indices of the `n` groups to keep, ascending."""
        if n == len(groups):
            return torch.arange(n)
        left = list(range(len(groups)))
        if self.surgeon is not None:
            while len(left) > n:
                worst = int(self.surgeon.costs(groups[left]).argmin())
                self.surgeon.remove(groups[left.pop(worst)])
            return torch.tensor(left)
        if self.criterion == "random":
            return torch.randperm(len(groups), generator=self.generator)[:n].sort().values
        w = self.plain.double()[:, groups].transpose(0, 1)  # [n, out, size]
        score = w.square().sum((1, 2))
        if self.criterion == "activation":
            block = self.moments[groups[:, :, None], groups[:, None, :]]
            score = ((w @ block) * w).sum((1, 2))
        return score.topk(n).indices.sort().values.cpu()


def _config(model: LanguageModel, target: _LayerShape) -> Any:
    """Return the configuration of the pruned model."""
    changes: dict[str, Any] = {"mlp_hidden": target.mlp_hidden} if target.mlp_hidden else {}
    head_counts = {"n_heads": target.n_heads, "n_kv_heads": target.n_kv_heads} if target.n_heads else {}
    if head_counts:
        mixers = model.config.mixers
        changes["mixers"] = {
            name: m.model_copy(update=head_counts) if isinstance(m, AttentionConfig) else m
            for name, m in mixers.items()
        }
    return type(model.config).model_validate(model.config.model_copy(update=changes).model_dump())


def _slice_layer(
    model: LanguageModel, n: int, shape: _LayerShape, kept: PrunedLayer, state: dict[str, Tensor]
) -> None:
    """Replace the tensors of layer `n` in `state`."""
    prefix = f"blocks.{n}."

    def rows(name: str, at: Tensor) -> None:
        for full in (prefix + name, f"{prefix}{name}.weight", f"{prefix}{name}.bias"):
            if full in state:
                state[full] = state[full][at.to(state[full].device)]

    if shape.n_heads:
        features = torch.arange(max(shape.n_heads, shape.n_kv_heads) * shape.head_dim).view(
            -1, shape.head_dim
        )
        q, kv = features[kept.heads].flatten(), features[kept.kv_heads].flatten()
        keys = shape.n_heads * shape.head_dim  # the first row of keys in `qkv`
        values = keys + shape.n_kv_heads * shape.head_dim
        rows("mixer.qkv", torch.cat([q, keys + kv, values + kv]))
        rows("mixer.q", q)
        rows("mixer.k", kv)
        rows("mixer.v", kv)
        rows("mixer.sink", kept.heads)
        rows("mixer.temperature", kept.heads)
        rows("mixer.smear.share", kept.kv_heads)
        state[f"{prefix}mixer.out.weight"] = kept.out
    if shape.mlp_hidden:
        gated = model.config.mlp in GATED
        rows(
            "mlp.up", torch.cat([kept.channels, shape.mlp_hidden + kept.channels]) if gated else kept.channels
        )
        state[f"{prefix}mlp.down.weight"] = kept.down
