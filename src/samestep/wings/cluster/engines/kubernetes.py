"""The manifest of Kubernetes: an indexed Job with a headless Service, or a TrainJob of Kubeflow's Trainer.

Each pod runs the command once, which starts the ranks of its node (`host_share.py`): the pods meet at the name that the Service
gives to the first one. A pod that is evicted gets SIGTERM, saves and ends with status 143, which does not count as a failure;
all pods start again and resume.

The text is YAML whose values are JSON, so that no text is read as something else. Sources: the API of batch/v1, Kubernetes 1.37, and
of trainer.kubeflow.org/v1alpha1, Trainer 2.3.
"""

from __future__ import annotations

import json
import re
from typing import Any

from samestep.errors import InputError
from samestep.wings.cluster.engines.launch_request import LaunchRequest


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
    if site.kind == "TrainJob":
        notes = ("kubectl apply -f THIS_FILE starts it, where Kubeflow's Trainer is installed.",)
        documents = [_train_job(request)]
    else:
        notes = (
            "kubectl apply -f THIS_FILE starts it. The pods meet at the name that the Service gives to the first one.",
        )
        documents = [_job(request), _service(request)]
    return (
        "\n---\n".join(
            ["\n".join([*request.head("kubernetes", *notes), _yaml(documents[0])]), *map(_yaml, documents[1:])]
        )
        + "\n"
    )


def _metadata(request: LaunchRequest) -> dict[str, Any]:
    namespace = request.site.kubernetes.namespace
    return {"name": request.name, **({"namespace": namespace} if namespace else {})}


def _command(request: LaunchRequest) -> list[str]:
    """Return the command of a pod: the words alone, or in a shell after the lines of the site."""
    words, setup = request.train_words(), request.site.run.setup
    if setup:
        words = ["sh", "-c", "\n".join([*setup, 'exec "$@"']), "sh", *words]
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """Return a text as Kubernetes passes it on: it replaces $(NAME) by a variable, and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _environment(request: LaunchRequest, more: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": _literal(value)} for name, value in (more | request.site.run.environment).items()]


def _resources(request: LaunchRequest) -> dict[str, Any]:
    site = request.site.kubernetes
    return {"resources": {"limits": {site.gpu: str(site.gpus_per_node)}}} if site.gpus_per_node else {}


def _volumes(request: LaunchRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and where they are mounted: the shared folder, and memory for workers to share."""
    site = request.site.kubernetes
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if site.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": site.claim}})
        mounts.append({"name": "shared", "mountPath": site.at})
    return volumes, mounts


def _job(request: LaunchRequest) -> dict[str, Any]:
    """Return the indexed Job, whose pods have the variables of a TrainJob's."""
    site = request.site.kubernetes
    volumes, mounts = _volumes(request)
    meeting = {
        "PET_NNODES": str(request.nodes),
        "PET_NPROC_PER_NODE": str(request.ranks_per_node),
        "PET_MASTER_ADDR": f"{request.name}-0.{request.name}",
        "PET_MASTER_PORT": str(site.port),
    }
    container = {
        "name": "train",
        "image": site.image,
        "command": _command(request),
        "env": _environment(request, meeting),
        **_resources(request),
        "volumeMounts": mounts,
    }
    passes = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [143]}},
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [2]}},
    ]
    pod = {
        "subdomain": request.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": site.grace_s,
        "containers": [container],
        "volumes": volumes,
    }
    spec = {
        "completions": request.nodes,
        "parallelism": request.nodes,
        "completionMode": "Indexed",
        "backoffLimit": site.restarts * request.nodes,
        "podFailurePolicy": {"rules": passes},
        "template": {"spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(request), "spec": spec}


def _service(request: LaunchRequest) -> dict[str, Any]:
    """Return the headless Service, by which a pod has a name before it is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": request.name},
        "ports": [{"name": "meeting", "port": request.site.kubernetes.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(request), "spec": spec}


def _train_job(request: LaunchRequest) -> dict[str, Any]:
    """Return the TrainJob; the Trainer gives its pods the variables of their rendezvous."""
    site = request.site.kubernetes
    volumes, mounts = _volumes(request)
    resources = _resources(request)
    environment = _environment(request, {})
    trainer = {
        "image": site.image,
        "command": _command(request),
        **({"env": environment} if environment else {}),
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks_per_node,
        **({"resourcesPerNode": resources["resources"]} if resources else {}),
    }
    pod = {
        "terminationGracePeriodSeconds": site.grace_s,
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "samestep.launch/run",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec = {"runtimeRef": {"name": site.runtime}, "trainer": trainer, "runtimePatches": [patch]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": spec,
    }


_MOST_IN_A_LINE = 100


def _yaml(value: Any, indent: int = 0) -> str:
    """Return a document as YAML: mappings and lists in lines, small ones within one, and every text in quotes."""
    pad, lines = " " * indent, []
    for key, item in value.items():
        flat = json.dumps(item)
        if not isinstance(item, dict | list) or len(flat) + indent < _MOST_IN_A_LINE:
            lines.append(f"{pad}{key}: {flat}")
        elif isinstance(item, dict):
            lines += [f"{pad}{key}:", _yaml(item, indent + 2)]
        else:
            lines += [f"{pad}{key}:", *(_item(part, indent) for part in item)]
    return "\n".join(lines)


def _item(value: Any, indent: int) -> str:
    flat, pad = json.dumps(value), " " * indent
    if not isinstance(value, dict) or len(flat) + indent < _MOST_IN_A_LINE:
        return f"{pad}- {flat}"
    text = _yaml(value, indent + 2)
    return f"{pad}- {text[indent + 2 :]}"
