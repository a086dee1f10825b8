"""Deployment manifests: schemas of the clusters, consistent fields, DNS discovery."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.errors import ConfigError
from whorl.machine.device_probe import usable_cores
from whorl.router.discovery import parse_host_port, resolve_urls, sync_replicas
from whorl.router.manifests import DeploymentSpec, manifest_for_command, render_manifest
from whorl.router.ray_app import command
from whorl.router.replica_pool import ReplicaPool
from whorl.router.routing_policy import RoutingPolicy

NEEDS: dict[str, Any] = {"volume_claim": "models", "key_secret": "keys", "gpus": 1}
FULL = DeploymentSpec(model="/models/small", name="shop", arguments=("--max-model-len", "4096"), **NEEDS)


def documents(spec: DeploymentSpec) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render_manifest("kubernetes", spec)))


def by_kind(spec: DeploymentSpec, kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d["spec"] for d in documents(spec) if d["kind"] == kind}


def pod_spec(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["template"]["spec"]  # type: ignore[no-any-return]


def option(command: list[str], name: str) -> str:
    """The value of a command line option."""
    return command[command.index(name) + 1]


MANIFESTS = st.builds(
    DeploymentSpec,
    model=st.text(min_size=1, max_size=20),
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
    arguments=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    replicas=st.integers(1, 9),
    gpus=st.integers(0, 2),
    volume_claim=st.none() | st.just("models"),
    key_secret=st.none() | st.just("keys"),
    memory_gib=st.floats(0.1, 500),
)


@settings(max_examples=5)
@given(MANIFESTS)
def test_kubernetes_manifests_match_the_schema(spec: DeploymentSpec) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    kinds = [d["kind"] for d in documents(spec)]
    assert kinds.count("Deployment") == 2 and "HorizontalPodAutoscaler" in kinds
    for document in documents(spec):
        for version in ("1.28", "1.33"):
            validate.validate(document, version, strict=True)


@settings(max_examples=15)
@given(MANIFESTS)
def test_ray_config_matches_the_schema(spec: DeploymentSpec) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    (manifest,) = yaml.safe_load_all(render_manifest("ray", spec))
    config = schema.ServeDeploySchema(**manifest)
    (application,) = config.applications
    assert application.args["model"] == spec.model
    (deployment,) = application.deployments
    assert deployment.autoscaling_config["min_replicas"] == spec.replicas


def test_selectors_match_exactly_their_pods() -> None:
    deployments, services = by_kind(FULL, "Deployment"), by_kind(FULL, "Service")
    budgets = by_kind(FULL, "PodDisruptionBudget")
    labels = {name: d["template"]["metadata"]["labels"] for name, d in deployments.items()}
    assert set(deployments) == set(services) == {"shop-replica", "shop-router"}
    for name, deployment in deployments.items():
        selectors = [deployment["selector"]["matchLabels"], services[name]["selector"]]
        for selector in [*selectors, budgets[name]["selector"]["matchLabels"]]:
            assert [n for n in labels if selector.items() <= labels[n].items()] == [name]
        (container,) = pod_spec(deployment)["containers"]
        assert services[name]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert services["shop-replica"]["clusterIP"] == "None"
    (scaler,) = by_kind(FULL, "HorizontalPodAutoscaler").values()
    assert scaler["scaleTargetRef"]["name"] == "shop-replica"
    router = pod_spec(deployments["shop-router"])["containers"][0]["command"]
    assert parse_host_port(option(router, "--discover")) == ("shop-replica", 8000)


def test_grace_period_exceeds_drain_time() -> None:
    for deployment in by_kind(FULL, "Deployment").values():
        pod = pod_spec(deployment)
        (container,) = pod["containers"]
        leave = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > int(option(container["command"], "--drain")) + leave
        assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_volumes_keys_and_resources_are_mounted() -> None:
    pod = pod_spec(by_kind(FULL, "Deployment")["shop-replica"])
    (server,) = pod["containers"]
    for mounts in (pod["volumes"], server["volumeMounts"]):
        assert {mount["name"] for mount in mounts} == {"models", "keys"}
    assert "--api-key-file" in server["command"] and "--no-auth" not in server["command"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert server["command"][-2:] == ["--max-model-len", "4096"]
    plain = pod_spec(by_kind(DeploymentSpec(model="m"), "Deployment")["whorl-replica"])
    assert "volumes" not in plain and "--no-auth" in plain["containers"][0]["command"]


def test_render_manifest_rejects_invalid_specs() -> None:
    with pytest.raises(ConfigError, match="nomad"):
        render_manifest("nomad", FULL)
    for name in ("Shop", "9shop", "shop-", "s" * 60):
        with pytest.raises(ConfigError, match="lower-case letters"):
            render_manifest("kubernetes", DeploymentSpec(model="m", name=name))
    with pytest.raises(ConfigError, match="max_replicas 1"):
        render_manifest("ray", DeploymentSpec(model="m", replicas=2, max_replicas=1))


def test_manifest_passes_on_command_line_options() -> None:
    words = ["serve", "m", "--manifest", "ray", "--max-model-len", "99", "--drain=5", "--no-auth"]
    text = manifest_for_command("ray", DeploymentSpec(model="m"), words, ("--manifest", "--drain"))
    args = yaml.safe_load(text)["applications"][0]["args"]
    assert args["arguments"] == ["--max-model-len", "99"]
    assert command(args)[2:] == ["whorl.cli", "serve", "m", "--max-num-seqs", "32", "--max-model-len", "99"]


def test_ray_manifest_fits_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "serve").mkdir()  # the verb, and no path
    (tmp_path / "keys.json").write_text('{"keys": []}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHORL_HOME", raising=False)

    def manifest(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["whorl", "serve", *words, "--manifest", "ray"])
        result = CliRunner().invoke(build_app(), ["serve", *words, "--manifest", "ray"])
        return yaml.safe_load(result.stdout) if result.exit_code == 0 else result.exit_code

    found = manifest("small", "--port", "8123")
    [application] = found["applications"]
    assert found["http_options"]["host"] == "127.0.0.1" and found["http_options"]["port"] == 8123
    assert (
        application["args"]["model"] == str(tmp_path / "small") and application["args"]["local_only"] is True
    )
    options = application["deployments"][0]["ray_actor_options"]
    assert 1 <= options["num_cpus"] <= max(1, usable_cores())
    assert options["memory"] < psutil.virtual_memory().available
    args = manifest("mine/pretrain", "--host", "0.0.0.0", "--api-key-file", "keys.json")["applications"][0][
        "args"
    ]
    assert args["model"] == "mine/pretrain" and args["local_only"] is False
    assert args["arguments"] == [
        "--api-key-file", str(tmp_path / "keys.json"), "--store", str(tmp_path / ".whorl")
    ]  # fmt: skip
    assert manifest("small", "--host", "0.0.0.0") == 2  # as `whorl serve`, it needs keys or --no-auth


@pytest.mark.parametrize("kind", ["kubernetes", "ray"])
def test_permitted_code_reaches_the_servers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_CODE", "")  # the command sets it in this process
    words = ["--code", "mine:length", "serve", "m", "--manifest", kind, "--max-model-len", "99"]
    monkeypatch.setattr("sys.argv", ["whorl", *words])
    found = list(yaml.safe_load_all(CliRunner().invoke(build_app(), words).stdout))
    if kind == "kubernetes":
        server = next(
            d for d in found if d["metadata"]["name"] == "whorl-replica" and d["kind"] == "Deployment"
        )
        [container] = pod_spec(server["spec"])["containers"]
        arguments, code = (
            container["command"],
            {e["name"]: e["value"] for e in container["env"]}["WHORL_CODE"],
        )
    else:
        [application] = found[0]["applications"]
        arguments, [replica] = command(application["args"])[3:], application["deployments"]
        code = replica["ray_actor_options"]["runtime_env"]["env_vars"]["WHORL_CODE"]
    assert code == "mine:length" and "--code" not in arguments and "mine:length" not in arguments
    assert option(arguments, "--max-model-len") == "99"


# DNS discovery


def test_sync_replicas_follows_dns() -> None:
    fleet = ReplicaPool(RoutingPolicy(random.Random(0)))
    sync_replicas(fleet, ["http://10.0.0.1:80", "http://10.0.0.2:80"])
    fleet.replicas["10.0.0.1:80"].healthy = True
    sent = fleet.dispatch(())
    assert sent is not None
    sync_replicas(fleet, [])
    assert set(fleet.replicas) == {"10.0.0.1:80", "10.0.0.2:80"}, "an empty lookup changes nothing"
    sync_replicas(fleet, ["http://10.0.0.2:80", "http://10.0.0.3:80"])
    assert set(fleet.replicas) == set(fleet.policy.loads) == {"10.0.0.2:80", "10.0.0.3:80"}
    fleet.policy.end(sent[1])
    found = asyncio.run(resolve_urls("localhost", 8000))
    assert "http://127.0.0.1:8000" in found or "http://[::1]:8000" in found
    assert asyncio.run(resolve_urls("no.such.name.invalid", 1)) == []
    for wrong in ("whorl", "whorl:", ":80", "whorl:0", "whorl:x"):
        with pytest.raises(ConfigError, match="--discover"):
            parse_host_port(wrong)
