"""The network that is aligned: a language model, what of it is trained, and how its words are judged.

    log_prob[t] = log softmax(z_t / temperature over the support)[target_t]

Temperature and support are those of the sampler (`engine/sampling/sampler.py`): a policy that acts at temperature 0.7 is another one
than the model itself, and the ratio of the two would count as learning. So both are arguments of `Network`, not of an
algorithm, and the engine's word for every token is compared with this one on every batch (`learn.py`).

Trained are all parameters, or the factors of a LoRA adapter (`models/lora.py` says what that is): they are added to the
products by hooks, so that the model's own names stay what they are, and `policy` gives weights as if the adapter had been
merged: what an engine is handed. With a critic (PPO) a linear read-out of the last hidden state says a value.

The subtle part is rows of padding. Only the targets that count are judged, gathered before the head's product, which is by
far the largest where a vocabulary is.

Rows, and every stream beside them, lie on the host, where they are sorted and cut; the network may lie on a GPU. What it
is asked goes there a micro-batch at a time (`here`), and what it says of rows (`score`) comes back to lie beside them. So
only what has gone through `here` ever meets a weight, and no algorithm says where anything is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whorl.align.config import LoRAConfig
from whorl.align.model.batch import micro_batches, sort_by_group, sort_by_length
from whorl.align.model.shared_prefix import find_shared_prefixes, shared_prefix_hidden, supports_shared_prefix
from whorl.models import LanguageModel, make_model
from whorl.models.lora import LoRA, LoRAFactors, init_lora, target_modules
from whorl.objectives.log_probs import token_log_probs
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.update import MicroBatch, ParamOptim
from whorl.train.lm.objective import param_optims

SCORE_POSITIONS = 1 << 13  # positions of a forward without gradients


@dataclass(frozen=True)
class TokenLogProbs:
    """Of the N targets that count, row by row: log_prob [N] with gradients; entropy, value [N] where asked for."""

    log_prob: Tensor
    entropy: Tensor | None
    value: Tensor | None
    sequence: Tensor


class PolicyModel(nn.Module):
    """See the top of this file.

    Args:
        model: to be trained, in its compute type, on its device: all that is added to it lies there too.
        temperature: that texts are sampled at; 1 where nothing is sampled.
        forbidden: ids that are never sampled.
        lora: train an adapter; None trains all.
        critic: with a value for every position.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        temperature: float = 1.0,
        banned_ids: Collection[int] = (),
        lora: LoRAConfig | None = None,
        critic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.temperature, self.lora = model, temperature, lora
        self.banned_mask: Tensor | None = None
        if banned_ids:
            out = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            out[sorted(banned_ids)] = True
            self.banned_mask = out.to(self.device)
        self.factors = nn.ParameterDict()
        self.lora_scale = 1.0
        if lora is not None:
            model.requires_grad_(False)
            made = init_lora(model, lora.rank, lora.alpha, lora.target_modules, generator(seed, "lora"))
            self.lora_scale = next(iter(made.factors.values())).scale
            layers = target_modules(model)
            for name, part in made.factors.items():
                self.factors[_escape_name(name) + "/a"] = nn.Parameter(part.a)
                self.factors[_escape_name(name) + "/b"] = nn.Parameter(part.b)
                layers[name].register_forward_hook(_LoRAHook(self, name))
        self.value = nn.Linear(model.config.d_model, 1, device=self.device) if critic else None
        if self.value is not None:
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.model.embedding.device

    def to_device(self, batch: MicroBatch) -> dict[str, Tensor]:
        """The rows where the weights lie; on a CPU the same tensors.

        The loop reads each micro-batch's loss before it takes the next one, so that a copy which runs by itself, from pinned
        memory, would have nothing to hide behind.
        """
        return {name: t.to(self.device) for name, t in batch.items()}

    def param_optims(self, optim: OptimConfig) -> dict[str, ParamOptim]:
        """How each parameter that is trained is optimised; an adapter's factors and the critic by AdamW."""
        found = (
            {f"model.{n}": t for n, t in param_optims(self.model, optim).items()} if self.lora is None else {}
        )
        found |= {f"factors.{n}": ParamOptim("adamw", optim.lr_adamw, 1.0) for n in self.factors}
        if self.value is not None:
            found |= {
                f"value.{n}": ParamOptim("adamw", optim.lr_adamw) for n, _ in self.value.named_parameters()
            }
        return found

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[B, T, d_model] of a part's tokens."""
        segments = batch.get("segment_ids")
        positions = None if segments is None else batch["positions"]
        found: Tensor = self.model(batch["tokens"], positions, segments)
        return found

    def target_hidden_states(self, batch: MicroBatch) -> Tensor:
        """[N, d_model] hidden states before the targets that count, row by row; what rows share is read once."""
        if "segment_ids" not in batch and supports_shared_prefix(self.model):
            found = find_shared_prefixes(batch)
            if found is not None:
                return shared_prefix_hidden(self.model, batch, found)
        return self.hidden(batch)[batch["loss_mask"]]

    def log_probs(self, batch: MicroBatch, *, entropy: bool = False) -> TokenLogProbs:
        """What it says of the targets that count; N of them. The part lies where the weights do (`here`)."""
        mask = batch["loss_mask"]
        hidden = self.target_hidden_states(batch)
        log_prob, spread = token_log_probs(
            hidden,
            self.model.head_weight,
            batch["targets"][mask],
            temperature=self.temperature,
            softcap=self.model.logit_softcap,
            banned_mask=self.banned_mask,
            entropy=entropy,
        )
        value = None if self.value is None else self.value(hidden.float()).squeeze(-1)
        return TokenLogProbs(log_prob, spread, value, batch["sequence"][mask])

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """log_prob (and value, with a critic) of all targets that count, [B, T] fp32, 0 elsewhere; beside the rows."""
        places = torch.arange(len(batch["tokens"]))
        together = sort_by_group if "group" in batch else sort_by_length
        rows = together({**batch, "source_row": places[:, None].expand_as(batch["tokens"])})
        size = max(1, SCORE_POSITIONS // rows["tokens"].shape[1])
        names = ["log_prob"] if self.value is None else ["log_prob", "value"]
        found = {name: torch.zeros(batch["tokens"].shape, device=self.device) for name in names}
        for piece in map(self.to_device, micro_batches(rows, size)):
            judged, mask = self.log_probs(piece), piece["loss_mask"]
            row, column = piece["source_row"][mask], mask.nonzero()[:, 1]
            found["log_prob"][row, column] = judged.log_prob
            if judged.value is not None:
                found["value"][row, column] = judged.value
        return {name: t.to(batch["tokens"].device) for name, t in found.items()}

    def adapter(self) -> LoRA:
        """The adapter as it is now."""
        names = {name.rsplit("/", 1)[0] for name in self.factors}
        return LoRA({
            _unescape_name(n): LoRAFactors(
                self.factors[n + "/a"].detach().clone(), self.factors[n + "/b"].detach().clone(), self.lora_scale
            )
            for n in sorted(names)
        })  # fmt: skip

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """The language model's weights by name, an adapter merged in: what an engine samples with."""
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        if self.lora is not None:
            for name, part in self.adapter().factors.items():
                weight = own[f"{name}.weight"]
                own[f"{name}.weight"] = weight.float() + part.delta
        return own

    def eval_copy(self) -> LanguageModel:
        """A model of the same shape, type and device with these weights as they are now, to be asked and not trained."""
        own = self.model
        twin = make_model(own.config, torch.Generator(), own.dtype).to(self.device)
        weights = dict(twin.named_parameters())
        with torch.no_grad():
            for name, tensor in self.merged_weights().items():
                weights[name].copy_(tensor)
        return twin.requires_grad_(False).eval()


class _LoRAHook:
    """A hook: what an adapter adds to the product of its layer."""

    def __init__(self, network: PolicyModel, name: str) -> None:
        self.factors, self.scale = network.factors, network.lora_scale
        self.a, self.b = _escape_name(name) + "/a", _escape_name(name) + "/b"

    def __call__(self, layer: nn.Module, given: Sequence[Any], out: Tensor) -> Tensor:
        x = given[0]
        a, b = self.factors[self.a].to(x.dtype), self.factors[self.b].to(x.dtype)
        added: Tensor = self.scale * ((x @ a.t()) @ b.t())
        return out + added


def _escape_name(name: str) -> str:
    return name.replace(".", ":")  # torch allows no dots in a parameter's own name


def _unescape_name(name: str) -> str:
    return name.replace(":", ".")


def frozen_reference(
    model: LanguageModel, policy: PolicyModel, weights: Iterable[tuple[str, Tensor]] = ()
) -> PolicyModel:
    """A network that is only asked: the reference of a KL, a teacher; judged as `like` is."""
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
    model.requires_grad_(False)
    model.context_hint = policy.model.context_hint
    network = PolicyModel(model, temperature=policy.temperature)
    network.banned_mask = policy.banned_mask
    return network.eval()
