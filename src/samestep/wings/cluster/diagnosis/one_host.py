"""The lines about one host, from its findings alone: what is well there, and what would fail or be slow."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.output.text import readable
from samestep.wings.cluster.diagnosis.findings import NO_LIMIT, Folder, HostFindings, Limits
from samestep.wings.cluster.diagnosis.gpus import LEAST_DRIVER, Gpus, Torch
from samestep.wings.cluster.diagnosis.identity import LOOPBACK_ADDRESSES, Identity, Network
from samestep.wings.cluster.diagnosis.report import Level, ReportLine

_FULL_BYTES, _LITTLE_BYTES = 64 << 20, 1 << 30
"""Space below which a folder counts as full, and below which it is little."""
_SHM_FULL_BYTES, _SHM_LITTLE_BYTES = 16 << 20, 512 << 20
_FEW_FILES, _LITTLE_FILES = 256, 1024


def lines_of(host_findings: HostFindings) -> list[ReportLine]:
    """Return the lines about one host by itself."""
    host = host_findings.identity.host
    lines = [about(host, *identity_line(host_findings.identity))]
    if host_findings.network is not None:
        lines += [about(host, *line) for line in _network_lines(host_findings.identity, host_findings.network)]
    if host_findings.folder is not None:
        lines.append(about(host, *_folder_line(host_findings.folder)))
    if host_findings.limits is not None:
        lines += [about(host, *line) for line in _limit_lines(host_findings.limits, host_findings.gpus)]
    if host_findings.gpus is not None:
        torch_cuda = host_findings.software.torch_cuda if host_findings.software is not None else ""
        lines.append(about(host, *_gpu_line(host_findings.gpus, torch_cuda)))
    lines += [_late_line(host, late) for late in host_findings.late]
    return lines


Parts = tuple[Level, str, str] | tuple[Level, str, str, str]


def about(host: str, level: Level, topic: str, text: str, remedy: str = "") -> ReportLine:
    """Return a line about one host."""
    return ReportLine(level, topic, text, remedy, (host,))


def _late_line(host: str, late: str) -> ReportLine:
    name, _, why = late.partition(": ")
    is_fault = name in ("folder", "network")
    remedy = (
        "Use a server of files or names that answers"
        if is_fault
        else "Repeat samestep doctor on a host that is less busy"
    )
    return ReportLine("fault" if is_fault else "warning", name, f"this probe found nothing: {why}", remedy, (host,))


def identity_line(who: Identity) -> Parts:
    """Return the line that says who a process is, and by which variables."""
    if who.refused:
        return "fault", "identity", who.refused, "samestep train rejects it too"
    if who.others:
        fix = "Pass the variables of the launcher to its processes"
        return "fault", "identity", f"a world of one, yet {who.others}: each is a run of its own", fix
    by = f" ({' '.join(who.variables)})" if who.variables else ""
    if who.size > 1:
        unit = "host" if who.is_host else "rank"
        number = f"{unit} {who.rank} of {who.size}" if who.rank >= 0 else f"one of {who.size} hosts"
        return "ok", "identity", f"{number} by {who.launcher}{by}"
    if len(who.listed) > 1 and who.inside:
        fix = "Use srun --ntasks-per-node=1 samestep doctor to check all of them"
        return "warning", "identity", f"inside {who.inside}, and no task of several: only this host is looked at", fix
    inside = f", inside {who.inside}" if who.inside else ""
    return (
        "ok",
        "identity",
        f"alone{inside}: no launcher's variables" if not by else f"a world of one by {who.launcher}{by}",
    )


def _network_lines(who: Identity, net: Network) -> Iterator[Parts]:
    if net.unknown:
        here = ", ".join(dict.fromkeys(interface.name for interface in net.interfaces if interface.is_up))
        yield (
            "fault",
            "interface",
            f"{' and '.join(net.unknown)} names no interface of this host",
            f"Use one of {here}, or none of these variables",
        )
    if who.size == 1:
        return
    yield from _name_lines(who, net)
    if not net.unknown:
        down = [interface.name for interface in net.interfaces if interface.name == net.chosen and not interface.is_up]
        if down:
            yield (
                "fault",
                "interface",
                f"{net.chosen} (by {net.chosen_by}) is down",
                f"Use ip link set {net.chosen} up, or another interface",
            )
        else:
            yield (
                "ok",
                "interface",
                f"{net.chosen}, {net.addresses[0] if net.addresses else 'no address'}, by {net.chosen_by}",
            )


def _name_lines(who: Identity, net: Network) -> Iterator[Parts]:
    at = net.meets_at
    if not net.meeting_addresses:
        fix = "Add it to DNS or /etc/hosts, or use its address as MASTER_ADDR"
        yield "fault", "names", f"{at}, at which all ranks meet, has no address here", fix
        return
    is_loopback = net.meeting_addresses[0].startswith(LOOPBACK_ADDRESSES)
    if is_loopback and any(not address.startswith(LOOPBACK_ADDRESSES) for address in net.first_addresses):
        fix = f"Set MASTER_ADDR={who.listed[0]}, the first host of the job"
        yield (
            "fault",
            "names",
            f"{at}, at which all ranks meet, is every host itself, and the job has {len(who.listed)}",
            fix,
        )
    else:
        where = f" is {net.meeting_addresses[0]}" if net.meeting_addresses[0] != at else ""
        yield "ok", "names", f"{at}, at which all meet,{where or ' is an address'}"


def _folder_line(folder: Folder) -> Parts:
    where = f"{folder.path} ({folder.kind})"
    if folder.error:
        return (
            "fault",
            "folder",
            f"nothing can be written to {where}: {folder.error}",
            "Use a folder that all hosts may write to: --folder DIR",
        )
    if folder.free_bytes < _FULL_BYTES:
        return "fault", "folder", f"{where} has {readable(folder.free_bytes)} left", "Free space for checkpoints"
    if folder.free_bytes < _LITTLE_BYTES:
        return (
            "warning",
            "folder",
            f"{where} has {readable(folder.free_bytes)} left",
            "checkpoints of most models need more",
        )
    return "ok", "folder", f"{where} can be written to, {readable(folder.free_bytes)} free"


def _limit_lines(limits: Limits, gpus: Gpus | None) -> Iterator[Parts]:
    free, where = limits.temporary_free_bytes, limits.temporary
    level: Level = "fault" if free < _FULL_BYTES else "warning" if free < _LITTLE_BYTES else "ok"
    shown, fix = f"{where} has {readable(free)} left", "Use another TMPDIR, or remove files there"
    yield level, "disk", shown, "" if level == "ok" else fix
    yield _shm_line(limits, gpus)
    files = limits.open_files
    level = "ok" if files == NO_LIMIT or files >= _LITTLE_FILES else "fault" if files < _FEW_FILES else "warning"
    shown = "without a limit" if files == NO_LIMIT else f"at most {files}"
    yield level, "files", f"{shown} open in a process", "" if level == "ok" else "Use ulimit -n 65536"


def _shm_line(limits: Limits, gpus: Gpus | None) -> Parts:
    if limits.shm_bytes == NO_LIMIT:
        return "ok", "shm", "this system has no /dev/shm"
    shown = f"/dev/shm has {readable(limits.shm_free_bytes)} of {readable(limits.shm_bytes)} left"
    fix = "Use --shm-size of the container, or an emptyDir of medium Memory, or remove files left there"
    if limits.shm_error:
        return "fault", "shm", f"no file can be written to /dev/shm: {limits.shm_error.lower()}; {shown}", fix
    if limits.shm_free_bytes < _SHM_FULL_BYTES:
        return "fault", "shm", shown, fix
    if limits.shm_free_bytes < _SHM_LITTLE_BYTES and gpus is not None and len(gpus.names) > 1:
        return "warning", "shm", f"{shown}, which NCCL and loaders of data share", fix
    return "ok", "shm", shown


def _gpu_line(gpus: Gpus, torch_cuda: str) -> Parts:
    if gpus.error:
        return ("fault", "driver", gpus.error, "Use a driver and tools of one version; a container needs both mounted")
    if not gpus.names:
        return "ok", "driver", "no GPU"
    shown = f"{len(gpus.names)} of {gpus.names[0]}, driver {gpus.driver}"
    if not torch_cuda:
        return "fault", "driver", f"{shown}, yet torch is built without CUDA", "Use a build of torch for CUDA"
    least = LEAST_DRIVER.get(_major(torch_cuda.rpartition(" ")[2]), 0)
    if torch_cuda.startswith("CUDA") and 0 < _major(gpus.driver) < least:
        fix = f"Use driver {least} or newer, or torch for an older CUDA"
        return "fault", "driver", f"{shown} is too old for torch's {torch_cuda}", fix
    if gpus.num_visible == 0:
        return (
            "warning",
            "driver",
            f"{shown}; {gpus.visible} hides all of them",
            f"Use no {gpus.visible.partition('=')[0]}",
        )
    return "ok", "driver", f"{shown}, {gpus.num_visible} visible; torch is built for {torch_cuda}"


def torch_line(host: str, torch: Torch, host_findings: HostFindings) -> ReportLine:
    """Return the line about what torch says on one host."""
    has_cuda = host_findings.software is not None and bool(
        host_findings.software.torch_cuda
    )  # a build without it has a line already
    gpus = host_findings.gpus if has_cuda else None
    if torch.error:
        fix = "Use python -c 'import torch; torch.ones(1).cuda()' to see more"
        level: Level = "warning" if torch.is_late else "fault"
        return ReportLine(level, "torch", torch.error.splitlines()[0], fix, (host,))
    if gpus is not None and not gpus.error and gpus.names and torch.gpus != gpus.num_visible:
        shown = f"torch sees {torch.gpus} GPUs, and the driver {gpus.num_visible}"
        fix = "Use the device files of all GPUs in the container, and one form of CUDA_VISIBLE_DEVICES"
        return ReportLine("fault", "torch", shown, fix, (host,))
    more = f", {torch.gpus} GPUs, NCCL {torch.nccl}" if torch.gpus else ""
    return ReportLine("ok", "torch", f"torch {torch.version}{more}", "", (host,))


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdecimal() else 0
