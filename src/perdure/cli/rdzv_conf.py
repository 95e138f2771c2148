"""Reads --rdzv-conf: torchrun's rendezvous settings in Perdure's terms. Knows no other flag."""

import msgspec

from perdure.cli.command_line import Values
from perdure.errors import ConfigError

_KEYS = (
    "join_timeout",
    "timeout",
    "read_timeout",
    "last_call_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)
_UNUSED = {
    "close_timeout": "closing needs no agreement here and takes 10 s at most",
    "heartbeat_timeout": "one late heartbeat does no harm before the lease ends (keep_alive_interval)",
    "store_type": "control is reached over TCP only",
}


class RdzvConf(msgspec.Struct, frozen=True, kw_only=True):
    """--rdzv-conf; None: not given."""

    join: float | None = None
    last_call: float | None = None
    lease: float | None = None
    is_host: bool | None = None


def read_conf(values: Values) -> RdzvConf:
    """--rdzv-conf, in Perdure's terms. Raises ConfigError, by name, for a key that has no counterpart."""
    settings: dict[str, float] = {}
    is_host: bool | None = None
    source = values.source("rdzv_conf")
    for item in (values.text("rdzv_conf") or "").strip().split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key == "" and value == "" and "=" not in item:
            continue
        if not key or not value:
            raise ConfigError(f"{source} has {item.strip()!r}, but must be KEY=VALUE,... as in join_timeout=900")
        if key == "is_host":
            is_host = _flag_value(source, value)
        elif key == "store_type" and value.lower() == "tcp":
            continue
        else:
            settings[key] = _conf_number(source, key, value)
    return RdzvConf(
        join=_join_timeout(settings),
        last_call=settings.get("last_call_timeout"),
        lease=_lease(settings),
        is_host=is_host,
    )


def _join_timeout(settings: dict[str, float]) -> float | None:
    """`read_timeout` is torchrun's wait for the store, which here is a wait for control, a part of joining."""
    join = settings.get("join_timeout", settings.get("timeout"))
    read = settings.get("read_timeout")
    return read if join is None else max(join, read or 0.0)


def _lease(settings: dict[str, float]) -> float | None:
    if not {"keep_alive_interval", "keep_alive_max_attempt"} & settings.keys():
        return None
    # Defaults as in torch 2.13, dynamic_rendezvous.create_handler.
    return settings.get("keep_alive_interval", 5.0) * settings.get("keep_alive_max_attempt", 3.0)


def _conf_number(source: str, key: str, value: str) -> float:
    if key in _UNUSED:
        raise ConfigError(f"{source} has {key}, which Perdure does not use: {_UNUSED[key]}; leave it out")
    if key not in _KEYS:
        known = ", ".join((*_KEYS, "is_host"))
        raise ConfigError(f"{source} has {key}, which Perdure does not know; it knows {known}")
    if not value.isdecimal() or int(value) == 0:
        raise ConfigError(f"{source} has {key}={value}, but its value must be a whole number above 0")
    return float(value)


def _flag_value(source: str, value: str) -> bool:
    # Spellings as in torch 2.13, RendezvousParameters.get_as_bool.
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise ConfigError(f"{source} has is_host={value}, but its value must be true or false")
