"""The policy: a language model with its trained parameters, scored under the sampler's distribution.

    log_prob[t] = log softmax(z_t / temperature over the support)[target_t]

Temperature and support are those of the sampler (`engine/sampling/sampler.py`). A policy at temperature 0.7 differs
from the model at 1, and the ratio between them would count as learning. So both are arguments of `PolicyModel`, not
of an algorithm, and every rollout batch compares the engine's log-probabilities with these (`rl/advantages.py`).

Either all parameters are trained, or the factors of a LoRA adapter (`models/lora.py`). Hooks add the adapter to the
layers' outputs, so the model's parameter names do not change. `merged_weights` returns the weights for an engine.
With a critic (PPO) a linear layer on the last hidden state returns a value.

The head's matrix product is the most expensive part for a large vocabulary. So only targets in the loss are scored.

Rows and their streams are on the CPU, where they are sorted and split; the network may be on a GPU. `to_device` moves a
micro-batch there, and `score` returns its result to the CPU. Algorithms do not handle devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whorl.align.config import LoRAConfig
from whorl.align.model.batch import micro_batches, sort_by_group, sort_by_length
from whorl.align.model.shared_prefix import (
    SharedPrefixBatch,
    find_shared_prefixes,
    shared_prefix_hidden,
    supports_shared_prefix,
)
from whorl.models import LanguageModel, make_model
from whorl.models.lora import LoRA, LoRAFactors, init_lora, target_modules
from whorl.nn.compiler import compiled
from whorl.nn.gpu.dispatch import logits_step
from whorl.objectives.log_probs import token_log_probs
from whorl.objectives.next_token import next_token
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.update import MicroBatch, ParamOptim
from whorl.train.lm.kernels import Kernels, choose_step_kernels, torch_kernels
from whorl.train.lm.objective import param_optims

SCORE_POSITIONS = 1 << 13  # positions of a forward pass without gradients
MIN_TIMED_FLOPS = 1e13  # FLOPs of a stage, about half a minute; timing its kernels takes two seconds
MIN_COMPILED_FLOPS = 4e13  # the first compilation takes 20 s, and halves a step
MAX_COMPILED_SHAPES = 2  # of rows with shared prompts
COMPILED_MULTIPLE = 8  # positions: so that more rollout batches have one shape


@dataclass(frozen=True)
class TokenLogProbs:
    """Results for the N targets in the loss, in row order.

    log_prob: [N] with gradients. entropy, value: [N], if requested.
    """

    log_prob: Tensor
    entropy: Tensor | None
    value: Tensor | None
    sequence: Tensor


class PolicyModel(nn.Module):
    """See the top of this file.

    Args:
        model: to be trained, in its compute dtype and on its device; additions use the same device.
        temperature: of the sampler; 1 without sampling.
        banned_ids: ids that are never sampled.
        lora: train an adapter; None trains all parameters.
        critic: add a value head.
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
        self.kernels, self.compiles = Kernels(), False  # set by `choose_kernels`
        self._compiled_trunk: Callable[..., Tensor] | None = None
        self._seen_shapes, self._compiled_shapes = set[tuple[int, ...]](), set[tuple[int, ...]]()
        self.banned_mask: Tensor | None = None
        self.routings: list[Any] | None = None  # filled by forward passes where experts are balanced
        if banned_ids:
            banned = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            banned[sorted(banned_ids)] = True
            self.banned_mask = banned.to(self.device)
        self.factors = nn.ParameterDict()
        self.lora_scale = 1.0
        if lora is not None:
            model.requires_grad_(False)
            adapter = init_lora(model, lora.rank, lora.alpha, lora.target_modules, generator(seed, "lora"))
            self.lora_scale = next(iter(adapter.factors.values())).scale
            layers = target_modules(model)
            for name, part in adapter.factors.items():
                self.factors[_escape_name(name) + "/a"] = nn.Parameter(part.a)
                self.factors[_escape_name(name) + "/b"] = nn.Parameter(part.b)
                layers[name].register_forward_hook(_LoRAHook(self, name))
        self.value = nn.Linear(model.config.d_model, 1, device=self.device) if critic else None
        if self.value is not None:
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.embedding.device

    def to_device(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Return the rows on the device of the weights; on a CPU the same tensors.

        The loop reads the loss of a micro-batch before it starts the next one, so an asynchronous copy could not
        overlap.
        """
        return {name: t.to(self.device) for name, t in batch.items()}

    def choose_kernels(self, rows: int, length: int, flops: float) -> None:
        """Choose the kernels of a stage on a CPU, and whether to compile its rows of one shape, where it is long enough.

        rows, length: of a forward pass with gradients. flops: of the whole stage.
        """
        self.kernels, self.compiles = torch_kernels(), False
        if self.device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
            return
        self.compiles = flops >= MIN_COMPILED_FLOPS and self.lora is None
        if flops >= MIN_TIMED_FLOPS:
            self.kernels = choose_step_kernels(self.model, rows, length)

    def param_optims(self, optim: OptimConfig) -> dict[str, ParamOptim]:
        """Return the optimizer of each trained parameter; adapter factors and critic use AdamW."""
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
        """Return [B, T, d_model] hidden states of a batch."""
        segments = batch.get("segment_ids")
        positions = None if segments is None else batch["positions"]
        found: Tensor = self.model(batch["tokens"], positions, segments, routings=self.routings)
        return found

    def target_hidden_states(self, batch: MicroBatch) -> Tensor:
        """Return [N, d_model] hidden states of the targets in the loss, in row order.

        A shared prompt is computed once.
        """
        if self.routings is None and "segment_ids" not in batch and supports_shared_prefix(self.model):
            found = find_shared_prefixes(batch, COMPILED_MULTIPLE if self.compiles else 1)
            if found is not None:
                return shared_prefix_hidden(self.model, batch, found, self._trunk_for(found))
        return self.hidden(batch)[batch["loss_mask"]]

    def _trunk_for(self, prefixes: SharedPrefixBatch) -> Callable[..., Tensor]:
        """Return the trunk, compiled for the first shapes that occur twice where a stage compiles."""
        trunk: Callable[..., Tensor] = self.model.trunk
        if not self.compiles or not torch.is_grad_enabled():
            return trunk
        shape = (*prefixes.shape, prefixes.is_padded)
        if shape not in self._compiled_shapes:
            if shape not in self._seen_shapes or len(self._compiled_shapes) == MAX_COMPILED_SHAPES:
                self._seen_shapes.add(shape)
                return trunk
            self._compiled_shapes.add(shape)
        self._compiled_trunk = self._compiled_trunk or compiled(trunk)
        return self._compiled_trunk

    def log_probs(self, batch: MicroBatch, *, entropy: bool = False) -> TokenLogProbs:
        """Return the results for the N targets in the loss. The batch is on the device of the weights (`to_device`)."""
        mask = batch["loss_mask"]
        hidden = self.target_hidden_states(batch)
        log_prob, entropies = token_log_probs(
            hidden,
            self.model.head_weight,
            batch["targets"][mask],
            temperature=self.temperature,
            softcap=self.model.logit_softcap,
            banned_mask=self.banned_mask,
            entropy=entropy,
        )
        value = None if self.value is None else self.value(hidden.float()).squeeze(-1)
        return TokenLogProbs(log_prob, entropies, value, batch["sequence"][mask])

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Return log_prob, and value with a critic, of all targets in the loss: [B, T] fp32, 0 elsewhere.

        The result is on the device of the batch.
        """
        row_index = torch.arange(len(batch["tokens"]))
        sort = sort_by_group if "group" in batch else sort_by_length
        rows = sort({**batch, "source_row": row_index[:, None].expand_as(batch["tokens"])})
        size = max(1, SCORE_POSITIONS // rows["tokens"].shape[1])
        names = ["log_prob"] if self.value is None else ["log_prob", "value"]
        scores = {name: torch.zeros(batch["tokens"].shape, device=self.device) for name in names}
        for piece in map(self.to_device, micro_batches(rows, size)):
            output, mask = self.log_probs(piece), piece["loss_mask"]
            row, column = piece["source_row"][mask], mask.nonzero()[:, 1]
            scores["log_prob"][row, column] = output.log_prob
            if output.value is not None:
                scores["value"][row, column] = output.value
        return {name: t.to(batch["tokens"].device) for name, t in scores.items()}

    @torch.no_grad()
    def sum_nll(self, batch: MicroBatch) -> float:
        """Return the summed loss in nats of all targets in the loss, over the whole vocabulary."""
        rows, total = sort_by_length(batch), 0.0
        for piece in map(
            self.to_device, micro_batches(rows, max(1, SCORE_POSITIONS // rows["tokens"].shape[1]))
        ):
            hidden = self.target_hidden_states(piece)
            targets = piece["targets"][piece["loss_mask"]]
            loss = next_token(
                hidden, self.model.head_weight, targets, torch.ones_like(targets, dtype=torch.bool),
                softcap=self.model.logit_softcap, select_step=logits_step,
            )  # fmt: skip
            total += float(loss.metrics["nll"])
        return total

    def adapter(self) -> LoRA:
        """Return the adapter with its current factors."""
        names = {name.rsplit("/", 1)[0] for name in self.factors}
        return LoRA({
            _unescape_name(n): LoRAFactors(
                self.factors[n + "/a"].detach().clone(), self.factors[n + "/b"].detach().clone(), self.lora_scale
            )
            for n in sorted(names)
        })  # fmt: skip

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """Return the language model's weights by name, with the adapter merged: the weights of the sampling policy."""
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        if self.lora is not None:
            for name, part in self.adapter().factors.items():
                weight = own[f"{name}.weight"]
                own[f"{name}.weight"] = weight.float() + part.delta
        return own

    def eval_copy(self) -> LanguageModel:
        """Return a frozen copy of the model with the current merged weights."""
        model = self.model
        model_copy = make_model(model.config, torch.Generator(), model.dtype).to(self.device)
        weights = dict(model_copy.named_parameters())
        with torch.no_grad():
            for name, tensor in self.merged_weights().items():
                weights[name].copy_(tensor)
        return model_copy.requires_grad_(False).eval()


class _LoRAHook:
    """Forward hook that adds an adapter's output to that of its layer."""

    def __init__(self, network: PolicyModel, name: str) -> None:
        self.factors, self.scale = network.factors, network.lora_scale
        self.a, self.b = _escape_name(name) + "/a", _escape_name(name) + "/b"

    def __call__(self, layer: nn.Module, inputs: Sequence[Any], out: Tensor) -> Tensor:
        x = inputs[0]
        a, b = self.factors[self.a].to(x.dtype), self.factors[self.b].to(x.dtype)
        added: Tensor = self.scale * ((x @ a.t()) @ b.t())
        return out + added


def _escape_name(name: str) -> str:
    return name.replace(".", ":")  # torch forbids dots in parameter names


def _unescape_name(name: str) -> str:
    return name.replace(":", ".")


def frozen_reference(
    model: LanguageModel, policy: PolicyModel, weights: Iterable[tuple[str, Tensor]] = ()
) -> PolicyModel:
    """Return a frozen network, such as a KL reference or a teacher, scored like `policy`."""
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)
    model.requires_grad_(False)
    model.context_hint = policy.model.context_hint
    network = PolicyModel(model, temperature=policy.temperature)
    network.banned_mask = policy.banned_mask
    return network.eval()
