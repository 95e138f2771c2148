"""The channel between processes: HTTP/1.1 with a token. The one door to the modules that make it up."""

from perdure.wire.exchange import Handler, RefusedError, Request, Response, Streamed
from perdure.wire.http_client import Channel
from perdure.wire.http_server import report_error, serve
from perdure.wire.tcp import Listener, client_tls, listen, server_tls

__all__ = [
    "Channel",
    "Handler",
    "Listener",
    "RefusedError",
    "Request",
    "Response",
    "Streamed",
    "client_tls",
    "listen",
    "report_error",
    "serve",
    "server_tls",
]
