"""From the address that a user gave to the medium behind it."""

import os

from perdure.errors import ConfigError
from perdure.store.disk import Disk
from perdure.store.medium import Medium


def open_medium(address: str) -> Medium:
    """At a plain path, a file:// URL or any other URL of fsspec. Raises ConfigError for what is none of them."""
    if not address or "\0" in address:
        raise ConfigError("the address of the store is empty; give a folder, or a URL as s3://bucket/folder")
    if address.startswith("file://"):
        address = address.removeprefix("file://").removeprefix("localhost")
    if "://" in address or "::" in address:
        from perdure.store.remote import open_remote  # fsspec is not paid for by those who write to a folder

        return open_remote(address)
    if not os.path.isabs(os.path.expanduser(address)):
        raise ConfigError(f"the store {address} is no full path: all nodes must find the same one; begin it with /")
    return Disk(os.path.normpath(os.path.expanduser(address)))
