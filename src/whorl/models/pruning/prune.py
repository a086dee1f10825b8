"""A smaller model out of a trained one: whole attention heads and MLP channels are taken out, and the rest makes good.

Both are groups of inputs of a matrix that writes into the residual stream: a head's features of `out`, a channel of `down`.
With that matrix W and the second moments H of its inputs over some text (`moments.py`), leaving out a group g and letting
the columns that stay answer by least squares costs

    cost(g) = tr(W_g S W_g^T),   S = inv([inv(H)]_gg);     W -= W_g S [inv(H)]_g:,   inv(H) -= [inv(H)]_:g S [inv(H)]_g:

the Optimal Brain Surgeon (Hassibi & Stork 1993), for groups of columns (Kurtic et al. 2023, ZipLM, arXiv:2302.04089).
So the cheapest group goes, the rest is refitted, and what is cheapest next is asked anew: of two channels that say the same
one goes and the other stays, where a measure of each by itself (activations times weights, as Wanda, arXiv:2306.11695, and
Minitron, arXiv:2407.14679, take it) would keep or drop both. `measure` names the controls: "activation" tr(W_g H_gg W_g^T)
without a refit, "magnitude" of the weights alone, "random".

What comes out is an ordinary model of the same class with another configuration, since every layer loses equally many: it
is saved, loaded, trained and served as any other. Of key heads whole groups go, with their query heads; of query heads
equally many in each group, so that grouped-query attention stays one. It is meant to be trained on a little:
`teacher_log_probs` gives what the large one says, `objectives/distil.py` the loss.

The subtle part is a damped H: an input that the text never used has no curvature and would be free to take any weight.

Shapes: W [out, in]; H [in, in] fp64; groups [n, size] column numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from whorl.errors import ConfigError, one_of
from whorl.models.decoder import Decoder
from whorl.models.language_model import LanguageModel
from whorl.models.pruning.activation_moments import second_moments
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig
from whorl.nn.mlp import GATED

PruneCriterion = Literal["obs", "activation", "magnitude", "random"]
DAMPING = 0.01  # of the mean of H's diagonal


class OptimalBrainSurgeon:
    """A matrix whose input columns are taken out in groups.  weight: [out, in]; moments: [in, in] fp64."""

    def __init__(self, weight: Tensor, moments: Tensor, damping: float = DAMPING) -> None:
        self.weight = weight.detach().double().clone()
        h = moments.clone()
        h.diagonal().add_(damping * h.diagonal().mean().clamp(min=1e-12))
        self.inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))

    def costs(self, groups: Tensor) -> Tensor:
        """[n]: what leaving out each group would cost, all others refitted."""
        if groups.shape[1] == 1:
            at = groups[:, 0]
            return self.weight[:, at].square().sum(0) / self.inverse.diagonal()[at]
        w = self.weight[:, groups].transpose(0, 1)  # [n, out, size]
        inside = self.inverse[groups[:, :, None], groups[:, None, :]]  # [n, size, size]
        answered: Tensor = torch.linalg.solve(inside, w.transpose(1, 2))
        return (w.transpose(1, 2) * answered).sum((1, 2))

    def remove(self, group: Tensor) -> None:
        """Leaves out one group [size]: its columns become 0, the others make good."""
        inside = self.inverse[group][:, group]
        taken = torch.linalg.solve(inside, self.inverse[group])  # [size, in]
        self.weight -= self.weight[:, group] @ taken
        self.inverse -= self.inverse[:, group] @ taken
        self.weight[:, group] = 0.0
        # What is gone has no say any more; 1 keeps its own block invertible
        self.inverse[group], self.inverse[:, group] = 0.0, 0.0
        self.inverse[group, group] = 1.0


@dataclass(frozen=True)
class PrunedLayer:
    """Of one layer: query heads, key heads and channels that stay, ascending; the matrices behind them, refitted or cut."""

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
    """A model of the same class with fewer heads or channels in every layer; `model` stays as it is.

    Args:
        rows: batches of ids [B, T] to measure with.
        heads, kv_heads, mlp_hidden: what each layer keeps; None keeps all. Without `kv_heads`, key heads go with `heads`
            where each has one query head, and stay otherwise.
        measure: what decides (see the top of this file); generator: of "random".

    Raises:
        ConfigError: a number that is impossible, or a layer that cannot be cut so (mixtures, slopes by head, lent keys).
    """
    if criterion not in get_args(PruneCriterion):
        raise ConfigError(f"criterion is {criterion!r}", expected=one_of(criterion, get_args(PruneCriterion)))
    if model.quantization is not None:
        raise ConfigError("the model is quantised", expected="one in full precision: prune first")
    shapes = [_layer_shape(model, n) for n in range(len(model.blocks))]
    target = _target(model, shapes, heads, kv_heads, mlp_hidden)
    names = [name for n in range(len(model.blocks)) for name in _prunable_weights(model, n) if name]
    moments = second_moments(model, rows, names)
    kept = [
        _select_units(model, n, shape, target, moments, criterion, generator)
        for n, shape in enumerate(shapes)
    ]
    config = _config(model, target)
    with torch.device("meta"):
        small = type(model)(config, dtype=model.dtype)
    if any(name not in small.state_dict() for name, _ in small.named_buffers()):
        small = type(model)(config, dtype=model.dtype)
    state = {name: t.detach() for name, t in model.state_dict().items()}
    for n, one in enumerate(kept):
        if one is not None:
            _slice_layer(model, n, shapes[n], one, state)
    small.load_state_dict({name: t.clone().contiguous() for name, t in state.items()}, assign=True)
    return small.to(model.embedding.device).train(model.training).requires_grad_(True)


@torch.inference_mode()
def teacher_log_probs(
    model: LanguageModel, ids: Tensor, top_k: int | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a teacher says after each position.  ids: [B, T] -> (log-probabilities [B, T, K] fp32, their ids [B, T, K]).

    top: K, the likeliest, best first; None for the whole vocabulary, in its order.
    """
    found = model.logits(model(ids, segments=segments)).log_softmax(-1)
    if top_k is None:
        return found, torch.arange(found.shape[-1], device=found.device).expand_as(found)
    values, indices = found.topk(min(top_k, found.shape[-1]), dim=-1)
    return values, indices


@dataclass(frozen=True)
class _LayerShape:
    """Of one layer; n_heads 0: no heads that could go."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_hidden: int


def _layer_shape(model: LanguageModel, n: int) -> _LayerShape:
    c = model.config
    if isinstance(model, Decoder):
        return _LayerShape(c.n_heads, c.n_kv_heads, c.head_dim, c.mlp_hidden)
    if not isinstance(model, Transformer):
        raise ConfigError(f"a {type(model).__name__} cannot be pruned", expected="a Decoder or a Transformer")
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
    """What each layer keeps; 0 where all stay."""
    with_heads = [s for s in shapes if s.n_heads]
    if heads is not None or kv_heads is not None:
        if not with_heads:
            raise ConfigError(
                "heads are to go, and no layer has any", expected="a model with attention heads"
            )
        if len({(s.n_heads, s.n_kv_heads) for s in with_heads}) > 1:
            raise ConfigError(
                "the layers have different numbers of heads", expected="one number, to cut from"
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
        if isinstance(model, Transformer):
            named = [m for m in model.config.layer_mixers() if isinstance(m, AttentionConfig)]
            if any(m.alibi for m in named):
                raise ConfigError(
                    "heads are to go, with alibi", expected="no slopes that depend on their number"
                )
            if model.config.kv_sharing_factor > 1 and kv_heads != first.n_kv_heads:
                raise ConfigError("kv_heads are to go, and layers lend them", expected="kv_sharing_factor = 1")
    if mlp_hidden is not None:
        if not all(s.mlp_hidden for s in shapes):
            raise ConfigError("mlp_hidden is to shrink, in a mixture of experts", expected="plain MLPs")
        if not 1 <= mlp_hidden <= shapes[0].mlp_hidden:
            raise ConfigError(f"mlp_hidden is {mlp_hidden}", expected=f"1 to {shapes[0].mlp_hidden}")
    return _LayerShape(heads or 0, kv_heads or 0, 0, mlp_hidden or 0)


def _prunable_weights(model: LanguageModel, n: int) -> tuple[str, str]:
    """Of the matrices behind heads and channels; "" where there is none that could be cut."""
    shape = _layer_shape(model, n)
    mixer = "attention" if isinstance(model, Decoder) else "mixer"
    return (
        f"blocks.{n}.{mixer}.out" if shape.n_heads else "",
        f"blocks.{n}.mlp.down" if shape.mlp_hidden else "",
    )


def _select_units(
    model: LanguageModel,
    n: int,
    shape: _LayerShape,
    target: _LayerShape,
    moments: dict[str, Tensor],
    measure: PruneCriterion,
    generator: torch.Generator | None,
) -> PrunedLayer:
    """Which heads and channels of layer `n` stay."""
    out_name, down_name = _prunable_weights(model, n)
    nothing = torch.zeros(0, dtype=torch.long)
    heads = kv_heads = channels = nothing
    out = down = torch.zeros(0, 0)
    if out_name:
        weight: Any = model.get_submodule(out_name).weight
        cutter = _Slicer(weight, moments[out_name], measure, generator)
        each, n_kv = shape.n_heads // shape.n_kv_heads, shape.n_kv_heads
        columns = torch.arange(shape.n_heads * shape.head_dim)
        kv_heads = cutter.keep(columns.view(n_kv, -1), target.n_kv_heads or n_kv)
        per_group = (target.n_heads or shape.n_heads) // len(kv_heads)
        found = []
        for kv in kv_heads.tolist():
            mine = torch.arange(kv * each, (kv + 1) * each)
            found.append(mine[cutter.keep(columns.view(shape.n_heads, -1)[mine], per_group)])
        heads = torch.cat(found)
        out = cutter.weight[:, columns.view(shape.n_heads, -1)[heads].flatten()].to(weight.dtype)
    if down_name:
        weight = model.get_submodule(down_name).weight
        cutter = _Slicer(weight, moments[down_name], measure, generator)
        channels = cutter.keep(torch.arange(shape.mlp_hidden)[:, None], target.mlp_hidden or shape.mlp_hidden)
        down = cutter.weight[:, channels].to(weight.dtype)
    return PrunedLayer(heads, kv_heads, channels, out, down)


class _Slicer:
    """Takes groups of columns out of one matrix, by a measure."""

    def __init__(
        self, weight: Tensor, moments: Tensor, measure: PruneCriterion, generator: torch.Generator | None
    ) -> None:
        self.surgeon = OptimalBrainSurgeon(weight, moments) if measure == "obs" else None
        self.plain, self.moments = weight.detach(), moments
        self.measure, self.generator = measure, generator

    @property
    def weight(self) -> Tensor:
        return self.plain if self.surgeon is None else self.surgeon.weight

    def keep(self, groups: Tensor, n: int) -> Tensor:
        """Numbers of the `n` of these groups that stay, ascending."""
        if n == len(groups):
            return torch.arange(n)
        left = list(range(len(groups)))
        if self.surgeon is not None:
            while len(left) > n:
                worst = int(self.surgeon.costs(groups[left]).argmin())
                self.surgeon.remove(groups[left.pop(worst)])
            return torch.tensor(left)
        if self.measure == "random":
            return torch.randperm(len(groups), generator=self.generator)[:n].sort().values
        w = self.plain.double()[:, groups].transpose(0, 1)  # [n, out, size]
        score = w.square().sum((1, 2))
        if self.measure == "activation":
            inside = self.moments[groups[:, :, None], groups[:, None, :]]
            score = ((w @ inside) * w).sum((1, 2))
        return score.topk(n).indices.sort().values.cpu()


def _config(model: LanguageModel, target: _LayerShape) -> Any:
    """The configuration with what stays."""
    changes: dict[str, Any] = {"mlp_hidden": target.mlp_hidden} if target.mlp_hidden else {}
    fewer = {"n_heads": target.n_heads, "n_kv_heads": target.n_kv_heads} if target.n_heads else {}
    if isinstance(model, Transformer) and fewer:
        mixers = model.config.mixers
        changes["mixers"] = {
            name: m.model_copy(update=fewer) if isinstance(m, AttentionConfig) else m
            for name, m in mixers.items()
        }
    else:
        changes |= fewer
    return type(model.config).model_validate(model.config.model_copy(update=changes).model_dump())


def _slice_layer(
    model: LanguageModel, n: int, shape: _LayerShape, kept: PrunedLayer, state: dict[str, Tensor]
) -> None:
    """Replaces the tensors of layer `n` in `state`."""
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
        if isinstance(model, Decoder):
            first, second = (
                shape.n_heads * shape.head_dim,
                (shape.n_heads + shape.n_kv_heads) * shape.head_dim,
            )
            rows("attention.qkv", torch.cat([q, first + kv, second + kv]))
            rows("attention.temperature", kept.heads)
            rows("attention.smear", kept.kv_heads)
            state[f"{prefix}attention.out.weight"] = kept.out
        else:
            rows("mixer.q", q)
            rows("mixer.k", kv)
            rows("mixer.v", kv)
            rows("mixer.sink", kept.heads)
            rows("mixer.smear.share", kept.kv_heads)
            state[f"{prefix}mixer.out.weight"] = kept.out
    if shape.mlp_hidden:
        gated = model.config.mlp in GATED
        rows(
            "mlp.up", torch.cat([kept.channels, shape.mlp_hidden + kept.channels]) if gated else kept.channels
        )
        state[f"{prefix}mlp.down.weight"] = kept.down
