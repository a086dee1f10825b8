"""Deployment manifests for Kubernetes and Ray Serve. They are printed, not applied.

    whorl serve MODEL --manifest kubernetes | kubectl apply -f -
    whorl serve MODEL --manifest ray > serve.yaml && serve deploy serve.yaml

On Kubernetes, router and replicas are two deployments. The cluster's load balancing uses neither prefixes nor queues, so it
only distributes clients over routers. The routers find the replicas through a headless service. No response is cut:

- A replica gets traffic while /health/ready succeeds and is killed when /health/live fails. A startup probe allows minutes
  for loading the model.
- A pod that terminates first leaves the endpoints (preStop waits for it) and then drains. Its grace period is longer than
  the server's drain time. Updates add a pod before they remove one, and disruptions affect one pod at a time.
- The autoscaler follows the waiting requests with the rules of `autoscaling_advice.py`: at most double after a minute, one
  fewer after ten minutes. The metric comes from /metrics through a metrics adapter of the cluster. Without an adapter, CPU
  use decides (the larger number is used).

Ray Serve gets one application with an autoscaled deployment (`ray_app.py`) and routes with its own proxies. A command line
gives it sizes of the machine on which it runs, so that Ray on that machine can start the replicas.
Tests validate every field against the schemas of both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, one_of
from whorl.http.hosts import is_loopback
from whorl.registry import PERMITTED
from whorl.router.replica_processes import drop_options

KINDS = ("kubernetes", "ray")
PORT = 8000
PRE_STOP_SECONDS = 5  # time until every router has removed the address
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


class DeploymentSpec(BaseModel):
    """A deployment. model: path in the container, as for `whorl serve`; arguments: further arguments of `whorl serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    name: str = Field(default="whorl", description="prefix of all resource names")
    image: str = Field(default="whorl:latest", description="container image with the command whorl")
    arguments: tuple[str, ...] = ()
    replicas: int = Field(default=2, ge=1)
    max_replicas: int | None = Field(default=None, ge=1, description="maximum; default four times `replicas`")
    routers: int = Field(default=2, ge=1)
    host: str = Field(default="127.0.0.1", description="address of Ray's proxies")
    port: int = Field(default=PORT, ge=1, le=65535, description="port of Ray's proxies")
    cpus: int = Field(default=4, ge=1, description="cores per replica")
    memory_gib: float = Field(default=8.0, gt=0)
    gpus: int = Field(default=0, ge=0)
    volume_claim: str | None = Field(
        default=None, description="persistent volume claim with models, mounted at /models"
    )
    key_secret: str | None = Field(
        default=None, description="secret with keys.json, written by `whorl keys add`"
    )
    queue_per_replica: int = Field(
        default=2, ge=1, description="waiting requests per replica that trigger a scale-up"
    )
    max_num_seqs: int = Field(default=32, ge=1, description="concurrent requests per replica")
    drain_seconds: int = Field(default=60, ge=1)
    code: str = Field(default="", description="code that data may name, as in WHORL_CODE")
    start_seconds: int = Field(default=600, ge=10, description="time for loading the model")


def render_manifest(kind: str, spec: DeploymentSpec) -> str:
    """Return YAML of `kind` ("kubernetes" or "ray").

    Raises:
        ConfigError: unknown kind, or a name that a cluster would reject.
    """
    if kind not in KINDS:
        raise ConfigError(f"--manifest {kind}", expected=one_of(kind, KINDS))
    if not NAME.fullmatch(spec.name):
        raise ConfigError(
            f"name {spec.name!r}",
            expected="lower-case letters, digits and -, starting with a letter, at most 42 characters",
        )
    if spec.max_replicas is not None and spec.max_replicas < spec.replicas:
        raise ConfigError(
            f"max_replicas {spec.max_replicas} is below replicas {spec.replicas}", expected="at least as many"
        )
    documents = kubernetes_manifests(spec) if kind == "kubernetes" else [ray_config(spec)]
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=110))


def manifest_for_command(
    kind: str, spec: DeploymentSpec, arguments: Sequence[str], consumed_options: Sequence[str]
) -> str:
    """Return the manifest for a command line (`serve MODEL ...`); options outside `consumed_options` go to the servers.

    Code that this process permits (`whorl --code`) is in the environment of the servers.
    """
    rest = drop_options(arguments, ("--code", *consumed_options))
    for argument in ("serve", spec.model):
        if argument in rest:
            rest.remove(argument)
    without_auth = [argument for argument in rest if argument != "--no-auth"]
    changes = {"arguments": tuple(without_auth), "code": os.environ.get(PERMITTED, "")}
    return render_manifest(kind, spec.model_copy(update=changes))


def kubernetes_manifests(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """Return services, deployments, disruption budgets and the autoscaler."""
    replicas, routers = f"{spec.name}-replica", f"{spec.name}-router"
    command = ["whorl", "serve", spec.model, "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--max-num-seqs", str(spec.max_num_seqs), "--drain", str(spec.drain_seconds)]
    command += ["--api-key-file", "/keys/keys.json"] if spec.key_secret else ["--no-auth"]
    command += spec.arguments
    route = ["whorl", "route", "--discover", f"{replicas}:{PORT}", "--host", "0.0.0.0", "--port", str(PORT)]
    route += ["--drain", str(spec.drain_seconds), *([] if spec.key_secret else ["--no-auth"])]
    memory = f"{round(spec.memory_gib * 1024)}Mi"
    sizes = {"cpu": str(spec.cpus), "memory": memory, **({"nvidia.com/gpu": spec.gpus} if spec.gpus else {})}
    live, ready = _probe("/health/live", 10, 6), _probe("/health/ready", 2, 2)
    server = _container(spec, command, {"requests": sizes, "limits": sizes}, live, ready)
    server["startupProbe"] = _probe("/health/ready", 2, -(-spec.start_seconds // 2))
    server["env"] = [{"name": name, "value": value} for name, value in _environment(spec).items()]
    small = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    router = _container(spec, route, small, _probe("/health/live", 10, 6), _probe("/health", 2, 2))
    volumes: list[dict[str, Any]] = []
    for name, path, source in (
        ("models", "/models", {"persistentVolumeClaim": {"claimName": spec.volume_claim, "readOnly": True}}),
        ("keys", "/keys", {"secret": {"secretName": spec.key_secret}}),
    ):
        if (spec.volume_claim if name == "models" else spec.key_secret) is not None:
            volumes.append({"name": name, **source})
            server.setdefault("volumeMounts", []).append({"name": name, "mountPath": path, "readOnly": True})
    return [
        _service(spec, replicas, headless=True),
        _service(spec, routers, headless=False),
        _deployment(spec, replicas, spec.replicas, server, volumes),
        _deployment(spec, routers, spec.routers, router, []),
        _disruption_budget(spec, replicas),
        _disruption_budget(spec, routers),
        _autoscaler(spec, replicas),
    ]


def ray_config(spec: DeploymentSpec) -> dict[str, Any]:
    """Return the configuration for `serve deploy`."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": spec.host, "port": spec.port, "request_timeout_s": 600},
        "applications": [
            {
                "name": spec.name,
                "route_prefix": "/",
                "import_path": "whorl.router.ray_app:app",
                "args": {
                    "model": spec.model,
                    "arguments": list(spec.arguments),
                    "max_num_seqs": spec.max_num_seqs,
                    "local_only": is_loopback(spec.host)
                    and not any("--api-key-file" in a for a in spec.arguments),
                },
                "deployments": [
                    {
                        "name": "Replica",
                        "max_ongoing_requests": 4 * spec.max_num_seqs,
                        "graceful_shutdown_timeout_s": spec.drain_seconds,
                        "health_check_period_s": 10,
                        "health_check_timeout_s": 60,
                        "autoscaling_config": {
                            "min_replicas": spec.replicas,
                            "max_replicas": _max_replicas(spec),
                            "target_ongoing_requests": spec.max_num_seqs + spec.queue_per_replica,
                            "upscale_delay_s": 60,
                            "downscale_delay_s": 600,
                        },
                        "ray_actor_options": {
                            "num_cpus": spec.cpus,
                            "num_gpus": spec.gpus,
                            "memory": round(spec.memory_gib * 1024**3),
                            "runtime_env": {"env_vars": _environment(spec)},
                        },
                    }
                ],
            }
        ],
    }


def _environment(spec: DeploymentSpec) -> dict[str, str]:
    """Return the variables of a server."""
    return {"OMP_NUM_THREADS": str(spec.cpus), **({PERMITTED: spec.code} if spec.code else {})}


def _max_replicas(spec: DeploymentSpec) -> int:
    return spec.max_replicas or 4 * spec.replicas


def _labels(spec: DeploymentSpec, name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": spec.name}


def _metadata(spec: DeploymentSpec, version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(spec, name)}}


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}


def _container(
    spec: DeploymentSpec,
    command: list[str],
    resources: dict[str, Any],
    live: dict[str, Any],
    ready: dict[str, Any],
) -> dict[str, Any]:
    return {
        "name": "whorl",
        "image": spec.image,
        "command": command,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources,
        "livenessProbe": live,
        "readinessProbe": ready,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _deployment(
    spec: DeploymentSpec, name: str, n: int, container: dict[str, Any], volumes: list[dict[str, Any]]
) -> dict[str, Any]:
    select = {"matchLabels": {"app.kubernetes.io/name": name}}
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    pod = {
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + spec.drain_seconds + 15,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [{**apart, "labelSelector": select}],
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
    }
    scrape = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(PORT),
        "prometheus.io/path": "/metrics",
    }
    return {
        **_metadata(spec, "apps/v1", "Deployment", name),
        "spec": {
            # The initial number; the autoscaler changes it later. An update adds a pod before it removes one.
            "replicas": n,
            "selector": select,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": _labels(spec, name), "annotations": scrape}, "spec": pod},
        },
    }


def _service(spec: DeploymentSpec, name: str, headless: bool) -> dict[str, Any]:
    own: dict[Literal["clusterIP"], str] = {"clusterIP": "None"} if headless else {}
    select = {"app.kubernetes.io/name": name}
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    return {**_metadata(spec, "v1", "Service", name), "spec": {**own, "selector": select, "ports": ports}}


def _disruption_budget(spec: DeploymentSpec, name: str) -> dict[str, Any]:
    select = {"matchLabels": {"app.kubernetes.io/name": name}}
    body = {"maxUnavailable": 1, "selector": select}
    return {**_metadata(spec, "policy/v1", "PodDisruptionBudget", name), "spec": body}


def _autoscaler(spec: DeploymentSpec, name: str) -> dict[str, Any]:
    waiting = {
        "metric": {"name": "whorl_sequences_waiting"},
        "target": {"type": "AverageValue", "averageValue": str(spec.queue_per_replica)},
    }
    busy = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 90}}
    up = {"type": "Percent", "value": 100, "periodSeconds": 60}
    down = {"type": "Pods", "value": 1, "periodSeconds": 600}
    return {
        **_metadata(spec, "autoscaling/v2", "HorizontalPodAutoscaler", name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": spec.replicas,
            "maxReplicas": _max_replicas(spec),
            "metrics": [{"type": "Pods", "pods": waiting}, {"type": "Resource", "resource": busy}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 60, "policies": [up]},
                "scaleDown": {"stabilizationWindowSeconds": 600, "policies": [down]},
            },
        },
    }
