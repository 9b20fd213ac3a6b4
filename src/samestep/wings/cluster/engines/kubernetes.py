"""The manifest of Kubernetes: an indexed Job with a headless Service, or a TrainJob of Kubeflow's Trainer.

Each pod runs the command once, which starts the ranks of its node (`host_share.py`): the pods meet at the name that the Service
gives to the first one. A pod that is evicted gets SIGTERM, saves and ends with status 143, which does not count as a failure;
all pods start again and resume.

The text is a template in YAML. The values in it are JSON, so that no text is read as something else. Sources: the API of batch/v1, Kubernetes 1.37, and
of trainer.kubeflow.org/v1alpha1, Trainer 2.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from samestep.errors import InputError
from samestep.wings.cluster.engines.launch_request import LaunchRequest, filled


def script(request: LaunchRequest) -> str:
    """Return the manifest.

    Raises:
        InputError: the site names no image.
    """
    site = request.site.kubernetes
    if not site.image:
        raise InputError(
            "launch-nodes",
            '--on kubernetes needs the image of the pods. Set image = "..." in [kubernetes] of --site',
        )
    is_train_job = site.kind == "TrainJob"
    # The Trainer gives its pods the variables of their rendezvous; the pods of a Job have the same ones from here.
    meeting = {
        "PET_NNODES": str(request.nodes),
        "PET_NPROC_PER_NODE": str(request.ranks_per_node),
        "PET_MASTER_ADDR": f"{request.name}-0.{request.name}",
        "PET_MASTER_PORT": str(site.port),
    }
    variables = ({} if is_train_job else meeting) | request.site.run.environment
    environment = [{"name": name, "value": _literal(value)} for name, value in variables.items()]
    limits = {"limits": {site.gpu: str(site.gpus_per_node)}}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if site.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}})
        mounts.append({"name": "shared", "mountPath": site.at})
    metadata = {"name": request.name, **({"namespace": site.namespace} if site.namespace else {})}
    values: Mapping[str, Any] = {
        "metadata": metadata, "run": request.name, "image": site.image, "nodes": request.nodes, "runtime": site.runtime,
        "ranks_per_node": request.ranks_per_node, "failures": site.restarts * request.nodes, "grace_s": site.grace_s,
        "port": site.port, "volumes": volumes, "mounts": mounts,
    }  # fmt: skip
    indent = " " * (4 if is_train_job else 8)
    names = ("env:", "resourcesPerNode") if is_train_job else ("", "resources")
    listed = [f"{indent}- {json.dumps(variable)}" for variable in environment]
    return filled(
        "kubernetes-trainjob.yaml" if is_train_job else "kubernetes-job.yaml",
        request,
        command=[f"{indent}- {json.dumps(word)}" for word in _command(request)],
        environment=[f"{indent}{names[0]}", *listed] if names[0] and listed else listed,
        resources=[f"{indent}{names[1]}: {json.dumps(limits)}"] if site.gpus_per_node else (),
        **{name: json.dumps(value) for name, value in values.items()},
    )


def _command(request: LaunchRequest) -> list[str]:
    """Return the command of a pod: the words alone, or in a shell after the lines of the site."""
    words, setup = request.train_words(), request.site.run.setup
    if setup:
        words = ["sh", "-c", "\n".join([*setup, 'exec "$@"']), "sh", *words]
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Return a text as Kubernetes passes it on: it replaces $(NAME) by a variable, and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)
