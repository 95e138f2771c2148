"""How many workers a node gets by `--nproc-per-node`, without importing torch.

It counts cores and NVIDIA GPUs as torch does (CUDA_VISIBLE_DEVICES included); for every other device the user gives the
number. It does not know what the devices can do.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from perdure.errors import ConfigError

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/dev/kfd")
_INDEX = re.compile(r"\s*[+-]?\d+")


def workers_per_node(text: str, source: str, environ: Mapping[str, str]) -> int:
    """The number that `text` (a count, auto, gpu or cpu) means on this machine. `source` names the flag in errors."""
    match text:
        case "cpu":
            return count_cores()
        case "gpu":
            gpus = count_gpus(environ)
            if gpus == 0:
                raise ConfigError(f"{source} is gpu, but no NVIDIA GPU is visible here; give a number, or cpu")
            return gpus
        case "auto":
            gpus = count_gpus(environ)
            if gpus == 0 and _AMD.exists():
                raise ConfigError(f"{source} is auto, but AMD GPUs are not counted; give their number")
            return gpus or count_cores()
        case "xpu":
            raise ConfigError(f"{source} is xpu, but Intel GPUs are not counted without torch; give their number")
    try:
        count = int(text)
    except ValueError:
        raise ConfigError(f"{source} is {text!r}, but must be a number, auto, gpu or cpu") from None
    if count < 1:
        raise ConfigError(f"{source} is {count}, but a node needs at least 1 worker")
    return count


def count_cores() -> int:
    """Cores that this process may use, as torchrun counts them."""
    return len(os.sched_getaffinity(0))


def count_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a process with `environ` sees."""
    physical = _physical_gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return physical if visible is None or physical == 0 else visible_gpus(visible, physical)


def visible_gpus(visible: str, physical: int) -> int:
    """How many of `physical` GPUs CUDA_VISIBLE_DEVICES=`visible` leaves.

    CUDA's rules: the list ends at the first entry that is no device, an entry given twice hides all, and a process sees
    one MIG slice only. Source: CUDA C++ Programming Guide, environment variables; torch.cuda._parse_visible_devices.
    """
    entries = visible.split(",")
    if visible.startswith("MIG-"):
        return 1
    if visible.startswith("GPU-"):
        named = [entry.strip() for entry in entries]
        kept = named[: next((i for i, e in enumerate(named) if not e.startswith("GPU-")), len(named))]
        return min(len(kept), physical) if len(set(kept)) == len(kept) else 0
    seen: list[int] = []
    for entry in entries:
        match = _INDEX.match(entry)
        if match is None or not 0 <= int(match[0]) < physical:
            break
        if int(match[0]) in seen:
            return 0
        seen.append(int(match[0]))
    return len(seen)


def _physical_gpus() -> int:
    try:
        return len(os.listdir(_NVIDIA))
    except OSError:  # no driver, or a sandbox that hides this part of /proc: ask the driver's own tool
        pass
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
