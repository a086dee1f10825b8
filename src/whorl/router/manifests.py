"""The same server beyond one machine: what Kubernetes and Ray Serve are to be told, written and not applied.

    whorl serve MODEL --manifest kubernetes | kubectl apply -f -
    whorl serve MODEL --manifest ray > serve.yaml && serve deploy serve.yaml

Kubernetes gets the router and the replicas as two deployments: the cluster's own balancing knows neither prefixes nor
queues, so it only carries clients to a router, and the routers find the replicas by the addresses of a service without an
address of its own (headless). What moves is written so that nobody's answer is cut:

- a replica takes part when /health/ready says so, and is ended when /health/live does not answer: reading a model in is
  given minutes (startup probe), hanging later is not;
- who is told to end first leaves the list of addresses (preStop waits for that), then drains, and is given longer for it
  than the server itself gives its answers; updates add before they take away, and disruptions take one at a time;
- the number of replicas follows the requests that wait, as `advice.py` would: up after a minute and to the double at most,
  down by one after ten minutes. The metric comes from the replicas' /metrics through whatever adapter the cluster has; until
  it is there, the processor's use decides (the greater of the two wins).

Ray Serve gets one application with an autoscaled deployment (`ray_app.py`); its own proxies route.

Every field is checked by tests against the schemas of both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, one_of
from whorl.router.replica_processes import drop_options

KINDS = ("kubernetes", "ray")
PORT = 8000
PRE_STOP_SECONDS = 5  # until every router has seen that an address is gone
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


class DeploymentSpec(BaseModel):
    """What is to run where. model: as `whorl serve` takes it inside of the container; arguments: further ones of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    name: str = Field(default="whorl", description="of everything that is made")
    image: str = Field(default="whorl:latest", description="a container that has the command whorl")
    arguments: tuple[str, ...] = ()
    replicas: int = Field(default=2, ge=1)
    max_replicas: int | None = Field(
        default=None, ge=1, description="replicas at most; default four times as many"
    )
    routers: int = Field(default=2, ge=1)
    cpus: int = Field(default=4, ge=1, description="cores a replica")
    memory_gib: float = Field(default=8.0, gt=0)
    gpus: int = Field(default=0, ge=0)
    volume_claim: str | None = Field(
        default=None, description="volume claim with the models, mounted at /models"
    )
    key_secret: str | None = Field(default=None, description="secret whose keys.json `whorl keys` wrote")
    queue_per_replica: int = Field(
        default=2, ge=1, description="waiting requests a replica that call for another one"
    )
    max_num_seqs: int = Field(default=32, ge=1, description="requests that a replica runs at once")
    drain_seconds: int = Field(default=60, ge=1)
    start_seconds: int = Field(default=600, ge=10, description="given to read the model in")


def render_manifest(kind: str, spec: DeploymentSpec) -> str:
    """YAML of `kind` ("kubernetes" or "ray").

    Raises:
        ConfigError: an unknown kind, or a name that a cluster would not take.
    """
    if kind not in KINDS:
        raise ConfigError(f"--manifest {kind}", expected=one_of(kind, KINDS))
    if not NAME.fullmatch(spec.name):
        raise ConfigError(
            f"name {spec.name!r}", expected="small letters, digits and -, beginning with a letter, 42 at most"
        )
    if spec.max_replicas is not None and spec.max_replicas < spec.replicas:
        raise ConfigError(
            f"at most {spec.max_replicas} replicas, and {spec.replicas} to begin with", expected="no fewer"
        )
    documents = kubernetes_manifests(spec) if kind == "kubernetes" else [ray_config(spec)]
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=110))


def manifest_for_command(
    kind: str, spec: DeploymentSpec, arguments: Sequence[str], consumed_options: Sequence[str]
) -> str:
    """The manifest for a command line (`serve MODEL ...`): options that are not in `own` are passed on to the servers."""
    rest = drop_options(arguments, consumed_options)
    for word in ("serve", spec.model):
        if word in rest:
            rest.remove(word)
    keyless = [word for word in rest if word != "--no-auth"]
    return render_manifest(kind, spec.model_copy(update={"arguments": tuple(keyless)}))


def kubernetes_manifests(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """Services, deployments, disruption budgets and the autoscaler."""
    replicas, routers = f"{spec.name}-replica", f"{spec.name}-router"
    command = ["whorl", "serve", spec.model, "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--max-num-seqs", str(spec.max_num_seqs), "--drain", str(spec.drain_seconds)]
    command += ["--api-key-file", "/keys/keys.json"] if spec.key_secret else ["--no-auth"]
    command += spec.arguments
    route = ["whorl", "route", "--discover", f"{replicas}:{PORT}", "--host", "0.0.0.0", "--port", str(PORT)]
    route += ["--drain", str(spec.drain_seconds)]
    memory = f"{round(spec.memory_gib * 1024)}Mi"
    sizes = {"cpu": str(spec.cpus), "memory": memory, **({"nvidia.com/gpu": spec.gpus} if spec.gpus else {})}
    live, ready = _probe("/health/live", 10, 6), _probe("/health/ready", 2, 2)
    server = _container(spec, command, {"requests": sizes, "limits": sizes}, live, ready)
    server["startupProbe"] = _probe("/health/ready", 2, -(-spec.start_seconds // 2))
    server["env"] = [{"name": "OMP_NUM_THREADS", "value": str(spec.cpus)}]
    small = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    # The router is alive while it answers at all, even if there is no replica to be had
    router = _container(spec, route, small, _probe("/metrics", 10, 6), _probe("/health", 2, 2))
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
    """The configuration of `serve deploy`."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT, "request_timeout_s": 600},
        "applications": [
            {
                "name": spec.name,
                "route_prefix": "/",
                "import_path": "whorl.router.ray_app:app",
                "args": {
                    "model": spec.model,
                    "arguments": list(spec.arguments),
                    "max_num_seqs": spec.max_num_seqs,
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
                            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(spec.cpus)}},
                        },
                    }
                ],
            }
        ],
    }


def _max_replicas(what: DeploymentSpec) -> int:
    return what.max_replicas or 4 * what.replicas


def _labels(what: DeploymentSpec, name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": what.name}


def _metadata(what: DeploymentSpec, version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(what, name)}}


def _probe(path: str, every: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": every, "failureThreshold": failures, "timeoutSeconds": 5}


def _container(
    what: DeploymentSpec,
    command: list[str],
    resources: dict[str, Any],
    live: dict[str, Any],
    ready: dict[str, Any],
) -> dict[str, Any]:
    return {
        "name": "whorl",
        "image": what.image,
        "command": command,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources,
        "livenessProbe": live,
        "readinessProbe": ready,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _deployment(
    what: DeploymentSpec, name: str, n: int, container: dict[str, Any], volumes: list[dict[str, Any]]
) -> dict[str, Any]:
    select = {"matchLabels": {"app.kubernetes.io/name": name}}
    apart = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    pod = {
        "terminationGracePeriodSeconds": PRE_STOP_SECONDS + what.drain_seconds + 15,
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
        **_metadata(what, "apps/v1", "Deployment", name),
        "spec": {
            # How many there are is the autoscaler's to say from then on; an update adds before it takes away
            "replicas": n,
            "selector": select,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": _labels(what, name), "annotations": scrape}, "spec": pod},
        },
    }


def _service(what: DeploymentSpec, name: str, headless: bool) -> dict[str, Any]:
    own: dict[Literal["clusterIP"], str] = {"clusterIP": "None"} if headless else {}
    select = {"app.kubernetes.io/name": name}
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    return {**_metadata(what, "v1", "Service", name), "spec": {**own, "selector": select, "ports": ports}}


def _disruption_budget(what: DeploymentSpec, name: str) -> dict[str, Any]:
    select = {"matchLabels": {"app.kubernetes.io/name": name}}
    spec = {"maxUnavailable": 1, "selector": select}
    return {**_metadata(what, "policy/v1", "PodDisruptionBudget", name), "spec": spec}


def _autoscaler(what: DeploymentSpec, name: str) -> dict[str, Any]:
    waiting = {
        "metric": {"name": "whorl_sequences_waiting"},
        "target": {"type": "AverageValue", "averageValue": str(what.queue_per_replica)},
    }
    busy = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 90}}
    up = {"type": "Percent", "value": 100, "periodSeconds": 60}
    down = {"type": "Pods", "value": 1, "periodSeconds": 600}
    return {
        **_metadata(what, "autoscaling/v2", "HorizontalPodAutoscaler", name),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": what.replicas,
            "maxReplicas": _max_replicas(what),
            "metrics": [{"type": "Pods", "pods": waiting}, {"type": "Resource", "resource": busy}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 60, "policies": [up]},
                "scaleDown": {"stabilizationWindowSeconds": 600, "policies": [down]},
            },
        },
    }
