"""Options of Baton's gRPC servers and channels, their TLS between nodes, and the proof of the cluster's token."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from wire.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    Unauthenticated,
    Unreachable,
    rebuild,
)
from wire.pb import inference_pb2 as pb
from wire.pb.worker_pb2 import ConnectRequest
from wire.trust.certificates import Certificates
from wire.trust.identity import NONCE_BYTES, ROUTER, Handshake, Identity, is_equal

Context = grpc.aio.ServicerContext[Any, Any]

TOKEN_METADATA = "baton-cluster-token"
NONCE_METADATA = "baton-nonce-bin"
PROMPT_TOKENS_METADATA, ADAPTED_METADATA = "baton-prompt-tokens", "baton-adapted"
BATCH_INVARIANT_METADATA = "baton-batch-invariant"
"""Keys of Generate's initial metadata, which comes once a request is admitted, is tokenized and has a worker."""
MAX_PROOF_S = 10.0
"""Bound on the time in which a line proves the token."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_TURNS = 4096
"""Bound on the messages of a chat."""
MAX_LINE_MESSAGE_BYTES = 64 << 20
"""Bound on a message between router and worker: tokens of many requests that a stopped router has not read."""
LINE_WINDOW_BYTES = 64 << 10
MAX_METADATA_BYTES = 16 << 10
KEEPALIVE_EVERY_MS = 10_000
MAX_PING_MS = 5_000
"""Bound on the time in which the other side answers a ping."""
MIN_PING_INTERVAL_MS = 5_000
MAX_HANDSHAKE_MS = 10_000
"""Bound on the time until HTTP/2 begins on a connection."""
MAX_IDLE_MS = 600_000
"""Bound on the time that a connection is without a call."""
MAX_CALLS_A_CONNECTION = 512
"""Bound on open calls; more wait in the client. A call that was opened and reset counts until the server has seen it.
"""
MAX_UNSEEN_CALLS = 4096
"""Bound on calls that the server has not seen; beyond it gRPC cancels some at random, of any client."""
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
NO_PROXY = (("grpc.enable_http_proxy", 0),)
"""A channel option that ignores the environment's proxies, for channels within a cluster and to this machine."""
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables of gRPC's proxies, with TLS and without; the first that is set counts."""
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", LINE_WINDOW_BYTES), ("grpc.http2.bdp_probe", 0))
"""A small HTTP/2 window, so that a short order overtakes a long order on a slow network, too."""
LINE_OPTIONS = (
    *CHANNEL_OPTIONS[2:],
    *NO_PROXY,
    ("grpc.max_receive_message_length", MAX_LINE_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_SMALL_WINDOW,
)
"""Options of a router's channel to a worker."""
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
"""Options of a worker's server; gRPC takes the first of two options with one name."""


class ProofInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses a line unless its router proves the token; health checks need no proof.

    It is a `Handshake`: nonce and answer are metadata, the router's proof is the first message.
    """

    def __init__(self, token: str) -> None:
        self._handshake = _handshake(token)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if asks_for_health(handler_call_details):
            return handler
        if handler is None or handler.stream_stream is None:
            return grpc.stream_unary_rpc_method_handler(_refuse)

        async def connect(requests: Any, context: Context) -> None:
            if await self._is_proven(requests, context):
                await handler.stream_stream(requests, context)
            else:
                await _refuse(requests, context)

        return grpc.stream_stream_rpc_method_handler(connect, handler.request_deserializer, handler.response_serializer)

    async def _is_proven(self, requests: Any, context: Context) -> bool:
        nonce, names = dict(context.invocation_metadata() or ()).get(NONCE_METADATA), context.peer_identities()
        if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES or (names and ROUTER.encode() not in names):
            return False
        answer, wanted = self._handshake.answer(nonce)
        await context.send_initial_metadata(((NONCE_METADATA, answer),))
        try:
            async with asyncio.timeout(MAX_PROOF_S):
                first = await anext(aiter(requests))
        except (TimeoutError, StopAsyncIteration, DecodeError):
            return False
        return is_equal(first.proof, wanted)


async def first_of_line(call: Any, token: str, nonce: bytes) -> ConnectRequest:
    """Waits for the worker's proof of the token; returns the proof to send first on the line with this nonce.

    Raises Unauthenticated without a valid proof, AioRpcError if the call ends.
    """
    answer = dict(await call.initial_metadata()).get(NONCE_METADATA, b"")
    if not answer:
        await call.read()  # raises what has ended the call
    return ConnectRequest(proof=_handshake(token).reply(nonce, answer))


def _handshake(token: str) -> Handshake:
    return Handshake(token.encode(), client=b"router", server=b"worker")


def asks_for_health(details: Any) -> bool:
    """Returns whether a call is a health check, which needs no proof."""
    return str(details.method).startswith("/grpc.health.v1.")


async def _refuse(_messages: Any, context: Context) -> None:
    error = Unauthenticated("the cluster's token is missing or wrong")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


def listen(server: grpc.aio.Server, host: str, port: int, proof: Identity | Certificates | None = None) -> str:
    """Binds a server to a port, for 0 a free port; returns the address. Raises ConfigError if the port is taken.

    proof: with an identity the server asks each client for a certificate of the cluster; None without TLS.
    """
    asked = f"{host}:{port}"
    try:
        bound = server.add_insecure_port(asked) if proof is None else server.add_secure_port(asked, _prove(proof))
    except RuntimeError as error:
        raise port_taken(host, port) from error
    return f"{host}:{bound}"


def _prove(proof: Identity | Certificates) -> grpc.ServerCredentials:
    if isinstance(proof, Certificates):

        def renew() -> Any:
            return _configuration(proof) if proof.refresh() else None

        return grpc.dynamic_ssl_server_credentials(_configuration(proof), renew, proof.pems.client_ca is not None)
    pair = proof.key_pem.encode(), proof.certificate_pem.encode()
    return grpc.ssl_server_credentials([pair], proof.authority_pem.encode(), require_client_auth=True)


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pems = certificates.pems
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.client_ca)


def open_channel(address: str, options: Sequence[tuple[str, Any]], identity: Identity | None) -> grpc.aio.Channel:
    """Opens a channel to a server. With TLS the server must show a certificate of the cluster for its host.

    identity: the client's; None without TLS.
    """
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    parts = (identity.authority_pem, identity.key_pem, identity.certificate_pem)
    credentials = grpc.ssl_channel_credentials(*(part.encode() for part in parts))
    return grpc.aio.secure_channel(address, credentials, options=options)


def proxy_to(address: str) -> str:
    """Names the environment variable whose proxy gRPC uses for a HOST:PORT; "" for none, as for this machine.

    Source: gRPC's environment variables. Ignores networks in no_proxy, such as 10.0.0.0/8, which gRPC respects.
    """
    host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    listed = next(filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy"))), "")
    excluded = tuple(one.strip() for one in listed.split(",") if one.strip())
    is_direct = host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.") or host.endswith(excluded)
    return "" if is_direct else next((name for name in PROXIES if os.environ.get(name)), "")


def port_taken(host: str, port: int) -> ConfigError:
    return ConfigError(f"port {port} of {host} cannot be had; is it in use?")


DOMAIN = "baton"
MAX_TIMELINE_BYTES = 4 << 10
"""Clients of gRPC take 8 KiB of metadata in all, in base64."""
_SPAN_HEAD_BYTES = 3


def to_status(error: BatonError) -> status_pb2.Status:
    """The google.rpc.Status of an error."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={**error.ids, "retryable": str(error.status.retryable).lower()},
    )
    details = [_pack(info)]
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.timeline is not None:
        details.append(_pack(bounded(error.timeline, len(error.message.encode()))))
    code: int = getattr(grpc.StatusCode, error.status.grpc).value[0]
    return status_pb2.Status(code=code, message=error.message, details=details)


def from_rpc_error(failure: grpc.aio.AioRpcError) -> BatonError:
    """The error a server of ours raised, or the nearest one for a failure of the call itself."""
    info, retry, timeline = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), pb.Timeline()
    for detail in details_of(failure):
        _ = detail.Unpack(info) or detail.Unpack(retry) or detail.Unpack(timeline)
    if info.domain == DOMAIN:
        ids = {name: value for name, value in info.metadata.items() if name != "retryable"}
        error = rebuild(info.reason, failure.details() or "", ids)
        if isinstance(error, Overloaded) and retry.HasField("retry_delay"):
            error.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        if timeline.spans:
            error.timeline = timeline
        return error
    return _from_code(failure.code())


def details_of(failure: grpc.aio.AioRpcError) -> Sequence[any_pb2.Any]:
    """The details of a server's status: ErrorInfo, maybe RetryInfo and Timeline. None if gRPC itself failed."""
    try:
        status = rpc_status.from_call(failure)
    except ValueError:  # the metadata were more than gRPC takes: its own code is another than the details'
        return ()
    return () if status is None else tuple(status.details)


def bounded(timeline: pb.Timeline, message_bytes: int = 0) -> pb.Timeline:
    """Returns a timeline of at most MAX_TIMELINE_BYTES: without its shortest spans, ends of attempts among the last.

    A message beside it travels twice, and up to three times as long where gRPC escapes it.
    """
    kept = pb.Timeline()
    kept.CopyFrom(timeline)
    del kept.spans[:]
    spans, left = list[pb.Span](), MAX_TIMELINE_BYTES - 4 * message_bytes - kept.ByteSize()
    for span in sorted(timeline.spans, key=lambda span: (not span.error, -span.duration_ms)):
        left -= span.ByteSize() + _SPAN_HEAD_BYTES
        spans += [span] if left >= 0 else []
    kept.spans.extend(sorted(spans, key=lambda span: span.start_ms))
    return kept


def _from_code(code: grpc.StatusCode) -> BatonError:
    """Says in our words what gRPC itself has met with; its own, with addresses, are in the failure."""
    by_code: dict[grpc.StatusCode, BatonError] = {
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded("the server did not answer in time"),
        grpc.StatusCode.CANCELLED: Cancelled("the call was cancelled"),
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded("the server refused the call, or it is too large"),
        grpc.StatusCode.UNAVAILABLE: Unreachable("the server cannot be reached, or its connection broke"),
    }
    return by_code.get(code, BatonError(f"the call failed: {code.name}"))


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
