"""Deployment manifests for Kubernetes and Ray Serve, from `kubernetes.yaml` and `ray.yaml`. They are printed, not applied.

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

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
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
    return str(yaml.safe_dump_all(_documents(kind, spec), sort_keys=False, width=110))


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


def _documents(kind: str, spec: DeploymentSpec) -> list[Any]:
    """Return the documents of a template of this folder."""
    replica, router = f"{spec.name}-replica", f"{spec.name}-router"
    listen, drain = ["--host", "0.0.0.0", "--port", str(PORT)], ["--drain", str(spec.drain_seconds)]
    no_auth = [] if spec.key_secret else ["--no-auth"]
    keys = ["--api-key-file", "/keys/keys.json"] if spec.key_secret else no_auth
    sizes = ["--max-num-seqs", str(spec.max_num_seqs), *drain]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_quoted
    )
    template = environment.from_string(Path(__file__).with_name(f"{kind}.yaml").read_text())
    text = template.render(
        spec=spec, replica=replica, router=router, port=PORT, pre_stop_seconds=PRE_STOP_SECONDS,
        serve=["whorl", "serve", spec.model, *listen, *sizes, *keys, *spec.arguments],
        route=["whorl", "route", "--discover", f"{replica}:{PORT}", *listen, *drain, *no_auth],
        max_replicas=spec.max_replicas or 4 * spec.replicas,
        memory=f"{round(spec.memory_gib * 1024)}Mi", memory_bytes=round(spec.memory_gib * 1024**3),
        environment={"OMP_NUM_THREADS": str(spec.cpus), **({PERMITTED: spec.code} if spec.code else {})},
        local_only=is_loopback(spec.host) and not any("--api-key-file" in a for a in spec.arguments),
    )  # fmt: skip
    return list(yaml.safe_load_all(text))


def _quoted(value: Any) -> str:
    """Return YAML of a value in one line; text of any characters, or like a number, remains this text."""
    return str(yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf)).strip()
