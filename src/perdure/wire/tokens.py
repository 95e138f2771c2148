"""Tokens: make one, check one, keep one in a file that only its owner reads. Does not know the environment."""

import hmac
import os
import re
import stat

from perdure.errors import ConfigError, HostError

_TOKEN = re.compile(r"[\x21-\x7e]{8,512}")  # what may stand in an HTTP header, and is long enough to be one


def make_token() -> str:
    """A new secret of 256 random bits, as 64 characters."""
    return os.urandom(32).hex()


def peer_token(token: str) -> str:
    """What agents show each other: made from `token`, which cannot be told from it.

    Agents have no certificates of their own, so they speak plain HTTP also where control serves HTTPS; what passes
    there must not open control's door.
    """
    return hmac.digest(token.encode(), b"perdure peer", "sha256").hex()


def parse_token(text: str) -> str:
    """`text` without white space around it. Raises ConfigError where that cannot be a token."""
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError("the token must be 8 to 512 printable ASCII characters without spaces; copy it anew")
    return token


def read_token(path: str) -> str:
    """The token in `path`. Raises ConfigError when it is missing, empty, or readable by group or others."""
    try:
        with open(
            os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="ascii", errors="replace"
        ) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"token file {path} is not a regular file; give one that holds the token")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"token file {path} is open to other users; run: chmod 600 {path}")
            text = file.read(4096)
    except OSError as exc:
        raise ConfigError(f"cannot read token file {path}: {(exc.strerror or str(exc)).lower()}") from exc
    try:
        return parse_token(text)
    except ConfigError as exc:
        raise ConfigError(f"token file {path} holds no token: {exc}") from None


def write_token(path: str, token: str) -> None:
    """Put `token` in `path` (mode 0600), whole or not at all, in place of what was there. Raises HostError."""
    new = f"{path}.{os.getpid()}.new"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(parse_token(token) + "\n")
            os.rename(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as exc:
        raise HostError(f"cannot write token file {path}: {(exc.strerror or str(exc)).lower()}") from exc
