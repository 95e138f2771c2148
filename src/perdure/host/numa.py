"""Which processors lie near the GPU of a local rank. Knows /sys; it binds nothing.

The four ways are torch's: torch 2.13, torch/numa/binding.py. GPUs are found in /sys instead of by CUDA, which this
process must not open; they are counted in PCI order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID and on machines of like GPUs.
"""

import os
from collections.abc import Callable, Iterable, Set
from pathlib import Path

from perdure.errors import ConfigError

BINDINGS = ("node", "socket", "exclusive", "core-complex")
_GPU_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, display, accelerator (pci.ids)


def cpus_for(
    binding: str,
    local_rank: int,
    slots: int,
    visible_devices: str | None = None,
    sys_root: Path = Path("/sys"),
    allowed: Set[int] | None = None,
) -> tuple[int, ...]:
    """The processors for the worker `local_rank` of `slots`, sorted.

    `visible_devices`: CUDA_VISIBLE_DEVICES where it is set. `allowed`: what this process may use, when None.
    Raises ConfigError when the machine does not tell, or has too few GPUs or processors.
    """
    machine = _Machine(sys_root, os.sched_getaffinity(0) if allowed is None else allowed)
    gpus = _visible(machine.gpu_nodes(), visible_devices)
    if slots > len(gpus):
        raise ConfigError(f"--numa-binding {binding}: {slots} workers but {len(gpus)} GPUs here; leave the flag out")
    node = gpus[local_rank]
    neighbours = [i for i, its_node in enumerate(gpus) if its_node == node]
    match binding:
        case "node":
            cpus = machine.node_cpus(node)
        case "socket":
            cpus = machine.socket_cpus(node)
        case "exclusive":
            cpus = _share_of_cores(_groups(machine.node_cpus(node), machine.core_of), neighbours, local_rank, node)
        case "core-complex":
            cpus = _complex_of(_groups(machine.node_cpus(node), machine.cache_of), neighbours.index(local_rank))
        case _:
            raise ConfigError(f"--numa-binding {binding}: there is no such way; take one of {', '.join(BINDINGS)}")
    if not cpus:
        raise ConfigError(f"--numa-binding {binding}: this process may use no processor of NUMA node {node}")
    return tuple(sorted(cpus))


def parse_ranges(text: str) -> set[int]:
    """The numbers in a list of the kernel: `0-2,4,6-7`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


class _Machine:
    """The reading side: files below /sys."""

    def __init__(self, root: Path, allowed: Set[int]) -> None:
        self._root, self._allowed = root, allowed

    def gpu_nodes(self) -> list[int]:
        """The NUMA node of every GPU, in PCI order."""
        devices = sorted((self._root / "bus/pci/devices").glob("*"))
        gpus = [d for d in devices if _is_gpu(d)]
        if not gpus:
            raise ConfigError("--numa-binding: no GPU is seen in /sys/bus/pci on this machine; leave the flag out")
        # -1: the machine has one node only, and says so for every device
        return [max(int(self._text(d / "numa_node")), 0) for d in gpus]

    def node_cpus(self, node: int) -> set[int]:
        return parse_ranges(self._text(self._root / f"devices/system/node/node{node}/cpulist")) & self._allowed

    def socket_cpus(self, node: int) -> set[int]:
        nodes = parse_ranges(self._text(self._root / "devices/system/node/possible"))
        by_node = {n: cpus for n in nodes if (cpus := self.node_cpus(n))}
        if node not in by_node:
            return set()
        socket = self._socket_of(min(by_node[node]))
        return {cpu for cpus in by_node.values() if self._socket_of(min(cpus)) == socket for cpu in cpus}

    def core_of(self, cpu: int) -> int:
        return min(parse_ranges(self._text(self._cpu(cpu) / "topology/thread_siblings_list")))

    def cache_of(self, cpu: int) -> int:
        """The lowest processor that shares the highest level of cache with `cpu`."""
        found = (-1, {cpu})
        for entry in (self._cpu(cpu) / "cache").glob("index[0-9]*"):
            level = int(self._text(entry / "level"))
            if self._text(entry / "type") in ("Unified", "Data") and level > found[0]:
                found = (level, parse_ranges(self._text(entry / "shared_cpu_list")))
        return min(found[1])

    def _socket_of(self, cpu: int) -> int:
        return int(self._text(self._cpu(cpu) / "topology/physical_package_id"))

    def _cpu(self, cpu: int) -> Path:
        return self._root / f"devices/system/cpu/cpu{cpu}"

    def _text(self, path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--numa-binding: {path} cannot be read ({error.strerror}); leave it out") from error


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    except OSError:
        return False
    return vendor in _GPU_VENDORS and kind[:6] in _GPU_CLASSES


def _visible(gpu_nodes: list[int], visible_devices: str | None) -> list[int]:
    if visible_devices is None:
        return gpu_nodes
    names = [name.strip() for name in visible_devices.split(",") if name.strip()]
    if not all(name.isdecimal() and int(name) < len(gpu_nodes) for name in names):
        raise ConfigError(
            f"--numa-binding: CUDA_VISIBLE_DEVICES={visible_devices} must name GPUs by number, below {len(gpu_nodes)}"
        )
    return [gpu_nodes[int(name)] for name in names]


def _groups(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for cpu in cpus:
        found.setdefault(key(cpu), set()).add(cpu)
    return dict(sorted(found.items()))


def _share_of_cores(cores: dict[int, set[int]], neighbours: list[int], local_rank: int, node: int) -> set[int]:
    """Whole cores; the first GPUs of a node get one more where the division leaves some."""
    each, left = divmod(len(cores), len(neighbours))
    if each < 1:
        raise ConfigError(
            f"--numa-binding exclusive: NUMA node {node} has {len(cores)} cores for {len(neighbours)} GPUs; take `node`"
        )
    at = neighbours.index(local_rank)
    start = at * each + min(at, left)
    mine = list(cores.values())[start : start + each + (1 if at < left else 0)]
    return {cpu for core in mine for cpu in core}


def _complex_of(caches: dict[int, set[int]], at: int) -> set[int]:
    """Caches with more usable processors first."""
    ordered = sorted(caches.items(), key=lambda item: (-len(item[1]), item[0]))
    return ordered[at % len(ordered)][1] if ordered else set()
