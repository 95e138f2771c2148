"""Network interfaces of this machine: which one holds an address. Knows nothing of routes."""

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s2xH4s16x") if struct.calcsize("P") == 8 else struct.Struct("16s2xH4s8x")
"""Name (with its label), port, IPv4 address: `struct ifreq` of netdevice(7)."""
_MOST = 1024


def interface_of(host: str) -> str | None:
    """Name of the interface that holds the address `host` (or the address of that name); None: none does."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    wanted = {ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found}
    return next((name for name, address in _addresses() if address in wanted), None)


def _addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    return [*_ipv4(), *_ipv6()]


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    space = array.array("B", bytes(_IFREQ.size * _MOST))
    pointer, _ = space.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(space), pointer))
    (used, _) = struct.unpack("iP", answer)
    rows = _IFREQ.iter_unpack(space.tobytes()[: used - used % _IFREQ.size])
    # A second address may have the label eth0:1; programs take the interface's own name.
    return [(name.rstrip(b"\0").decode().partition(":")[0], ipaddress.IPv4Address(ip)) for name, _, ip in rows]


def _ipv6() -> list[tuple[str, ipaddress.IPv6Address]]:
    try:
        rows = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return []  # IPv6 is switched off
    found = [row.split() for row in rows if row]
    return [(row[-1], ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in found]
