"""The networks of a pretraining job: model, shared memory of its replicas, learner."""

from __future__ import annotations

from whorl.models import LanguageModel, make_model
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import generator
from whorl.train.determinism import deterministic
from whorl.train.job import Job
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loss_scaler import LossScaler
from whorl.train.learner.update import AcceptStep, Update, accept_if_finite
from whorl.train.lm.kernels import Kernels, choose_kernels, torch_kernels
from whorl.train.lm.laid_out import LaidOutObjective, lay_out
from whorl.train.lm.objective import LMObjective, freeze_routers_from, param_optims
from whorl.train.lm.precision import activation_dtype, make_rounding, muon_dtype, set_products
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.optim import mup
from whorl.train.resilience.memory_budget import job_activation_checkpointing


def build_model(job: Job) -> LanguageModel:
    """Return the untrained model of `job`; the seed determines its bits.

    Raises:
        BudgetError: the activations do not fit into `activation_budget`.
    """
    with deterministic(job.deterministic):
        model = make_model(job.model, generator(job.seed, "weights"), activation_dtype(job.dtype)).to(
            job.device
        )
        mup.scale_head_init(model, job.optim)
        set_products(model, job.dtype)
        return job_activation_checkpointing(model, job)


def allocate_shared(model: LanguageModel, job: Job) -> SharedState:
    """Allocate the memory that all replicas of `job` share."""
    rows = job.batch_size // job.replicas * job.seq_len
    return SharedState.allocate(
        model, param_optims(model, job.optim), job.replicas, rows, bf16_matrices=bool(job.bf16_weights)
    )


def build_learner(
    model: LanguageModel,
    job: Job,
    shared: SharedState,
    process_group: ProcessGroup,
    moe: MoEBalancer | None = None,
    steps_done: int = 0,
    accept_step: AcceptStep = accept_if_finite,
    loss_scaler: LossScaler | None = None,
    choose_always: bool = False,
    kernels: Kernels | None = None,
) -> Learner:
    """Return the learner of a language model: one update, next-token prediction.

    choose_always: of `choose_kernels`. kernels: in place of its choice.
    """
    optim, moe = job.optim, moe or MoEBalancer(model, job.routing, process_group)
    laid = objective = None
    if job.layout is None:
        kernels = kernels or choose_kernels(model, job, choose_always)
    else:
        for name, p in model.named_parameters():
            p.data = shared.weights[name]
        kernels, laid = torch_kernels(), lay_out(model, job, moe)
        objective = LaidOutObjective(laid)
    treated = freeze_routers_from(model, param_optims(model, optim), job.routing.freeze_router_step)
    update = Update(
        objective
        or LMObjective(
            model,
            moe,
            z_loss=job.z_loss,
            compile=job.compile,
            chunk_tokens=kernels.chunk_tokens,
            length=job.seq_len if job.long_ratio and not job.compile_long else None,
            objective=job.objective,
        ),
        treated,
        clip_norm=optim.clip_norm,
        momentum=optim.momentum,
        muon_every=optim.muon_every,
        weight_decay=optim.weight_decay,
        betas=(0.8, 0.95),
        eps=1e-10,
        fused=kernels.fused_adamw if optim.fused is None else optim.fused,
        accept_step=accept_step,
        loss_scaler=loss_scaler or (LossScaler() if job.dtype == "float16" else None),
        rounding=make_rounding(job.bf16_weights, job.seed, treated),
        native=kernels.native_update,
    )
    return Learner(
        model,
        [update],
        shared,
        process_group,
        dtype=muon_dtype(model.dtype),
        steps_done=steps_done,
        laid=laid,
    )
