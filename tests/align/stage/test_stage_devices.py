"""Every stage on another device than the CPU: a fake one on any machine (`fake_device.py`), a GPU where is_fake is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.byte_model import decoder, tokenizer
from tests.support.align.fake_device import DEVICE, FakeDevice, MixedDevices, is_fake
from tests.support.align.stage_inputs import MOE
from tests.support.align.stage_runs import STAGES, Killed, StageRun, ahead, begin, weights
from torch import Tensor

from whorl.align.data.curriculum import Curriculum
from whorl.align.rl.config import AsyncRolloutConfig
from whorl.align.rl.rollout import RolloutWorker, assign_devices
from whorl.errors import ConfigError
from whorl.machine.device_probe import probe
from whorl.models import make_model, save_model
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress
from whorl.tracking.seeds import generator

HERE = str(DEVICE)
pytestmark = pytest.mark.usefixtures("one_runner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(tmp_path_factory.mktemp("model") / "begun")


@pytest.fixture
def pretended() -> Iterator[None]:
    with FakeDevice():
        yield


def assert_metrics_close(
    found: list[dict[str, float]], wanted: list[dict[str, float]], within: float, *names: str
) -> None:
    """Compare all metrics of every step, or only `names`."""
    assert [set(metrics) for metrics in found] == [set(metrics) for metrics in wanted]
    for metrics, other in zip(found, wanted, strict=True):
        for name in set(names or metrics) & set(metrics):
            assert metrics[name] == pytest.approx(other[name], rel=within, abs=within), name


def relative_distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the relative distance of two sets of weights."""
    pairs = [(found[name].flatten(), tensor.flatten()) for name, tensor in wanted.items()]
    a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float((a - b).norm() / b.norm())


def test_fake_device_rejects_mixed_devices(pretended: None) -> None:
    layer = torch.nn.Linear(4, 3).to(DEVICE)
    x = torch.zeros(2, 4, device=DEVICE)
    y = layer(x).sum()
    y.backward()
    made = [torch.arange(3, device=x.device), torch.zeros_like(x), x[torch.tensor([0])], x[:, 1]]
    assert all(t is not None and t.device == DEVICE for t in (x, y, layer.weight.grad, *made))
    assert float(y.detach()) == float(y.detach().cpu()) and (x + torch.tensor(1.0)).device == DEVICE
    assert x.cpu().device.type == "cpu" and x.cpu().numpy().shape == (2, 4)
    for wrong in (
        lambda: layer(torch.zeros(2, 4)),
        lambda: x + torch.zeros(4),
        lambda: torch.zeros(2, 4)[x > 0],
        lambda: torch.cat([x, torch.zeros(1, 4)]),
        lambda: torch.zeros(3).index_add_(0, torch.arange(3), x[0, :3]),
    ):
        with pytest.raises(MixedDevices):
            wrong()
    with pytest.raises(TypeError, match="move it first"):
        x.numpy()


@pytest.mark.parametrize("stage", STAGES)
def test_stage_keeps_tensors_on_device(stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of devices is an error.

    The numbers are those of the CPU, bit for bit, except where sampling uses another path with other rounding.
    """
    # Kernel choice depends on the device, and kernels round differently: both sides use one kernel.
    monkeypatch.setattr("whorl.nn.attention.backends._select_backend", lambda *_: "sdpa")
    plain, run = StageRun(folder, "cpu"), StageRun(folder, HERE)
    wanted = weights(STAGES[stage](plain))
    with FakeDevice():
        learnt = STAGES[stage](run)
        assert all(is_fake(t) for t in (*learnt.parameters(), *learnt.buffers()))
        found = weights(learnt)
    within = 1e-3 if any("logprob_diff_max" in metrics for metrics in plain.history) else 0.0
    assert_metrics_close(run.history, plain.history, within)
    assert relative_distance(found, wanted) <= within


RESUMED = ("kto", "ppo")


def check_resume(stage: str, folder: Path, scratch: Path, device: str, within: dict[str, float]) -> None:
    """Kill a run on `device` and resume it on others. within: the largest distance of the weights on each."""
    first = StageRun(folder, device)
    whole = weights(STAGES[stage](first))
    with pytest.raises(Killed):
        STAGES[stage](StageRun(folder, device, scratch / "killed", kill=3))
    for other, limit in within.items():
        again = StageRun(folder, other, shutil.copytree(scratch / "killed", scratch / other))
        assert relative_distance(weights(STAGES[stage](again)), whole) <= limit
        assert len(again.history) < len(first.history)


@pytest.mark.parametrize("stage", RESUMED)
def test_stage_resumes_on_device_and_cpu(stage: str, folder: Path, tmp_path: Path, pretended: None) -> None:
    """Weights, optimizer state and precomputed values return to the device; the CPU can resume too."""
    check_resume(stage, folder, tmp_path, HERE, {HERE: 0.0, "cpu": 1e-3})


def test_stage_with_experts_stays_on_device(tmp_path: Path, pretended: None) -> None:
    save_model(make_model(MOE, generator(0, "weights")), tmp_path / "mixture")
    tokenizer(tmp_path / "mixture")
    for stage in ("sft", "grpo", "distil-on-policy"):
        assert all(map(is_fake, STAGES[stage](StageRun(tmp_path / "mixture", HERE)).parameters()))


def check_async_worker(run: StageRun, device: str = "auto") -> None:
    ahead(run, device)
    assert all(metrics["logprob_diff_max"] < 1e-4 for metrics in run.history[:-1])


def test_async_worker_gets_device_weights(folder: Path, pretended: None) -> None:
    check_async_worker(StageRun(folder, HERE))


def assigned(folder: Path, patch: pytest.MonkeyPatch, gpus: int, learner: str, ahead: Any) -> list[str]:
    """Return the devices of the rollout workers on a machine with `gpus` GPUs."""
    patch.setattr(torch.cuda, "device_count", lambda: gpus)
    worker = RolloutWorker(decoder().config, "float32", folder, [], 4, 4, 24, 1.0, Curriculum([0.0]))
    devices = assign_devices(worker, AsyncRolloutConfig.model_validate(ahead), torch.device(learner))
    return [one.device for one in devices]


@pytest.mark.parametrize(
    ("learner", "gpus", "ahead", "wanted"),
    [
        ("cuda:0", 1, {"workers": 0}, ["cuda:0"]),  # lockstep: the learner's device
        ("cpu", 2, {"workers": 2}, ["cpu", "cpu"]),
        ("cuda:0", 1, {"workers": 2}, ["cpu", "cpu"]),  # the learner has the only GPU
        ("cuda:0", 3, {"workers": 3}, ["cuda:1", "cuda:2", "cuda:1"]),
        ("cuda:1", 2, {"workers": 1}, ["cuda:0"]),
        ("cuda:0", 3, {"workers": 2, "device": "cpu"}, ["cpu", "cpu"]),
        ("cuda:0", 1, {"workers": 2, "device": "cuda"}, ["cuda:0", "cuda:0"]),
        ("cpu", 2, {"workers": 3, "device": "cuda"}, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:0", 4, {"workers": 2, "backend": "ray"}, ["cpu", "cpu"]),
        # Each Ray actor sees only its own GPU.
        ("cuda:0", 1, {"workers": 2, "backend": "ray", "device": "cuda"}, ["cuda", "cuda"]),
    ],
)
def test_assign_devices_by_setting(
    learner: str, gpus: int, ahead: Any, wanted: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assigned(folder, monkeypatch, gpus, learner, ahead) == wanted


def test_assign_devices_rejects_missing_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"async_rollout\.device is cuda"):
        assigned(folder, monkeypatch, 0, "cpu", {"workers": 1, "device": "cuda"})


RECIPE = """
name = "away"
[steps]
init_model = {d_model = 32, n_layers = 2, n_heads = 2, mlp_hidden = 32}
sums = {uses = "tasks", source = "arithmetic", max_train = 24, max_test = 4, levels = {0 = 1.0}, columns = false}
taught = {uses = "sft", parents = ["init_model", "sums"], data.seq_len = 64, data.batch_size = 4}
likes = {uses = "preferences", source = "files", path = "likes.jsonl", test_fraction = 0.25}
reward_model = {parents = ["taught", "likes"], data.seq_len = 32}
preference = {parents = ["taught", "likes"], data.seq_len = 32, model.lora = {rank = 2, merge = false}}
[steps.rl]
parents = ["preference", "sums", "reward_model"]
algorithm = "grpo"
kl = {coef = 0.1}
steps = 2
prompts_per_step = 2
group_size = 4
max_completion_tokens = 6
max_seq_len = 40
[steps.distil]
parents = ["rl", "sums"]
student = {n_layers = 1}
data.seq_len = 64
on_policy_fraction = 0.5
max_completion_tokens = 4
data.batch_size = 6
"""


@pytest.mark.usefixtures("pretended")
def test_recipe_runs_on_other_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe steps: metrics before and after, a reward model, a merged adapter."""
    found = replace(probe(dtype="float32"), device=HERE)
    monkeypatch.setattr("whorl.machine.device_probe.probe", lambda: found)
    monkeypatch.chdir(tmp_path)
    pairs = [json.dumps({"prompt": f"{i}?", "chosen": "yes", "rejected": "nay"}) for i in range(24)]
    Path("likes.jsonl").write_text("\n".join(pairs) + "\n")
    recipe, store = parse_recipe(RECIPE, "away.toml"), Store(tmp_path / "store")
    made = run_recipe(recipe, store, Progress.silent()).artifacts
    assert {"reward_model_score", "accuracy"} <= set(made["rl"].summary["eval"]["after"])
    assert made["distil"].summary["eval"]["after"]["tasks"] == 4


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=GPU) for stage in STAGES])
def test_gpu_matches_cpu(stage: str, folder: Path) -> None:
    """A few steps in fp32: sums in another order, so close and not equal."""
    plain, run = StageRun(folder, "cpu"), StageRun(folder, "cuda")
    wanted, learnt = weights(STAGES[stage](plain)), STAGES[stage](run)
    assert all(p.is_cuda for p in learnt.parameters())
    names = ("loss", "nll", "kl", "grad_norm", "reward", "rewards/margin")
    assert_metrics_close(run.history, plain.history, 2e-2, *names)
    assert relative_distance(weights(learnt), wanted) < 1e-2
    assert all(metrics["logprob_diff_max"] < 1e-4 for metrics in run.history if "logprob_diff_max" in metrics)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=GPU) for stage in RESUMED])
def test_gpu_resumes_after_kill(stage: str, folder: Path, tmp_path: Path) -> None:
    """Not bit for bit, since atomic additions on a GPU have no order."""
    check_resume(stage, folder, tmp_path, "cuda", {"cuda": 1e-2})


@pytest.mark.parametrize("device", [pytest.param(device, marks=GPU) for device in ("auto", "cpu", "cuda")])
def test_async_worker_with_gpu_learner(device: str, folder: Path) -> None:
    check_async_worker(StageRun(folder, "cuda"), device)
