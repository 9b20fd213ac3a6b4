"""The command that hands a run to a cluster of Ray: Ray Train starts the ranks, and starts them again where nodes are lost."""

from __future__ import annotations

import json

from samestep.engines.wanted import LaunchRequest, shell


def script(wanted: LaunchRequest) -> str:
    """Return the script, to be run where the cluster is reached."""
    ray = wanted.site.ray
    words = ["ray", "job", "submit", "--working-dir", ".", *(["--address", ray.address] if ray.address else [])]
    if wanted.site.run.environment:  # what is exported here does not reach the cluster
        words += ["--runtime-env-json", json.dumps({"env_vars": wanted.site.run.environment})]
    line = f'{shell(words)} --submission-id "{wanted.name}-$(date +%s)"'
    driver = ["python", "-m", "samestep.engines.ray_job", *([wanted.job] if wanted.job else [])]
    driver += [word for setting in wanted.settings for word in ("--set", setting)]
    driver += ["--layout", wanted.layout] if wanted.layout else []
    driver += ["--ranks", str(wanted.ranks), "--out", wanted.out, "--failures", str(ray.failures)]
    driver += ["--cpus-per-rank", f"{ray.cpus_per_rank:g}", "--gpus-per-rank", f"{ray.gpus_per_rank:g}"]
    driver += ["--storage", ray.storage] if ray.storage else []
    notes = ("The job file is sent with the folder it is run in; the run folder must be one that all nodes see.",)
    lines = ["#!/bin/bash", *wanted.head("ray", *notes), *wanted.setup()]
    return "\n".join([*lines, f"exec {line} -- \\", f"    {shell(driver)}"]) + "\n"
