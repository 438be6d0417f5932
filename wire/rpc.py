"""Options of every gRPC server and channel of ours, and the check of the cluster's token."""

import hmac
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from wire.errors import ConfigError, Unauthenticated
from wire.rpc_status import to_status

TOKEN_METADATA = "baton-cluster-token"
MAX_MESSAGE_BYTES = 4 << 20
MAX_LINE_MESSAGE_BYTES = 64 << 20
"""Between a router and a worker: the tokens of many requests that a stopped router has not read."""
LINE_WINDOW_BYTES = 64 << 10
MAX_METADATA_BYTES = 16 << 10
KEEPALIVE_EVERY_MS = 10_000
MAX_PING_MS = 5_000
"""How long the other side may take to answer a ping."""
MIN_PING_INTERVAL_MS = 5_000
MAX_HANDSHAKE_MS = 10_000
"""How long a connection may take until HTTP/2 begins."""
MAX_IDLE_MS = 600_000
"""How long a connection may have no call open."""
MAX_CALLS_A_CONNECTION = 512
"""More wait in the client. Calls that were opened and reset count until the server has looked at them."""
MAX_UNSEEN_CALLS = 4096
"""Calls that the server has not looked at; of more, gRPC cancels some at random, of any client."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_EVERY_MS),
    ("grpc.keepalive_timeout_ms", MAX_PING_MS),
    ("grpc.http2.ping_timeout_ms", MAX_PING_MS),  # else 60 s, where gRPC waits for a ping of its own just then
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share a connection, and its number of calls
)
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", LINE_WINDOW_BYTES), ("grpc.http2.bdp_probe", 0))
"""So little is on its way that a short order overtakes a long one on a slow network, too."""
LINE_OPTIONS = (
    *CHANNEL_OPTIONS[2:],
    ("grpc.max_receive_message_length", MAX_LINE_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_SMALL_WINDOW,
)
"""Of a router's channel to a worker."""
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # gRPC takes what is below the first, refuses what is over the second, and between the two leaves it to chance.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", MAX_HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.max_concurrent_streams", MAX_CALLS_A_CONNECTION),
    ("grpc.server.max_pending_requests", MAX_UNSEEN_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_UNSEEN_CALLS),
    ("grpc.so_reuseport", 0),
)
WORKER_SERVER_OPTIONS = (
    *(option for option in SERVER_OPTIONS if option[0] != "grpc.max_send_message_length"),
    ("grpc.max_send_message_length", MAX_LINE_MESSAGE_BYTES),
    *_SMALL_WINDOW,
)
"""Of two options of one name gRPC takes the first."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses calls without the cluster's token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith("/grpc.health.v1."):
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_METADATA, "")
        if hmac.compare_digest(str(given).encode(), self._token):
            return await continuation(handler_call_details)
        return grpc.stream_unary_rpc_method_handler(_refuse)


async def _refuse(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    error = Unauthenticated("the cluster's token is missing or wrong")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


def listen(server: grpc.aio.Server, host: str, port: int) -> str:
    """Binds a server to a port, a free port for 0. Returns the address; raises ConfigError if the port is taken."""
    try:
        return f"{host}:{server.add_insecure_port(f'{host}:{port}')}"
    except RuntimeError as error:
        raise port_taken(host, port) from error


def port_taken(host: str, port: int) -> ConfigError:
    return ConfigError(f"port {port} of {host} cannot be had; is it in use?")
