"""The application of the gateway before a router in this process: no sockets."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from baton import AsyncClient
from baton.client import AsyncStream
from baton.request import (
    ChatOptions,
    Message,
    Metadata,
    Options,
    Prompt,
    make_detokenize_request,
    make_request,
    make_tokenize_request,
)
from baton.results import Model, Tokens, read_timeline
from gateway.app import Gateway
from gateway.observe.metrics import Metrics
from gateway.observe.watch import ClusterWatch, OperatorClient
from router.config import RouterConfig
from router.ports.interceptors import credentials_of
from router.ports.operator import ClusterApi
from router.requests.dispatch import OpenRequest
from router.router import Router
from tests.harness.cluster import WAIT_S
from tests.harness.fake_cluster import CONFIG, FakeCluster, running
from text.chat import Renderer
from wire.errors import BatonError, Cancelled
from wire.ids import TRACEPARENT
from wire.pb import inference_pb2 as pb
from wire.pools import Addresses
from wire.rpc import ADAPTED_METADATA, BATCH_INVARIANT_METADATA, PROMPT_TOKENS_METADATA, bounded
from wire.trust.key_ring import NO_KEYS, KeyList, KeyRing, Scope, bearer, page_key

TIMEOUT_S = 20.0


class LocalClient(AsyncClient):
    """A client that calls the router itself."""

    def __init__(self, router: Router) -> None:
        super().__init__("127.0.0.1:1")  # a channel connects at its first call, which never comes
        self._router = router

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        call = LocalCall(self._router, make_request(prompt, options), self._metadata, timeout_s)
        return AsyncStream(call, timeout_s)

    async def tokenize(self, prompt: str | Sequence[Message], **options: Unpack[ChatOptions]) -> Tokens:
        answer = await self._router.dispatcher.tokenize(make_tokenize_request(prompt, options))
        return Tokens(tuple(answer.token_ids), tuple(answer.tokens))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._router.dispatcher.detokenize(make_detokenize_request(token_ids)).text

    async def require_ready(self, timeout_s: float | None = None) -> None:
        """The router is in this process."""

    async def list_models(self) -> tuple[Model, ...]:
        model = self._router.config.model
        return tuple(
            Model(
                name=name,
                max_context_len=model.max_context_len,
                dtype=model.dtype,
                fingerprint=model.fingerprint_hex,
                tool_format=self._router.dispatcher.formats.tool,
                reasoning_format=self._router.dispatcher.formats.reasoning,
            )
            for name in (model.name, *model.aliases)
        )


class LocalOperator(OperatorClient):
    """A client that calls the router's service for the operator itself. num_calls: of each method."""

    def __init__(self, router: Router) -> None:
        super().__init__("127.0.0.1:1")
        self._router = router
        self._page_key = page_key(router.config.cluster.token)
        self.num_calls: Counter[str] = Counter()
        self.failure: list[BatonError] = []

    async def _call(self, method: str, request: Any) -> Any:
        credentials = credentials_of(self._metadata)
        if bearer(credentials) != self._page_key:
            self._router.keys.admit(credentials, Scope.OPERATE)
        if self.failure:
            raise self.failure[0]
        self.num_calls[method] += 1
        return await getattr(ClusterApi(self._router, Addresses()), method)(request, None)


class LocalCall:
    """A call of Generate, which begins when it is read."""

    def __init__(self, router: Router, request: pb.GenerateRequest, metadata: Metadata, timeout_s: float) -> None:
        self._router = router
        self._request = request
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._opened: OpenRequest | None = None

    async def initial_metadata(self) -> Metadata:
        try:
            outbox = self._open().outbox
            num_prompt_tokens = await outbox.begun
        except BatonError:  # which reading raises, as gRPC has it
            return ()
        told = (PROMPT_TOKENS_METADATA, str(num_prompt_tokens)), (ADAPTED_METADATA, ", ".join(outbox.adapted))
        promised = () if self._router.config.model.batch_invariant else ((BATCH_INVARIANT_METADATA, "false"),)
        return (*told, *promised) if num_prompt_tokens else ()

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        try:
            async for response in self._open().outbox:
                yield response
        except BatonError as error:  # over gRPC the client reads it
            if error.timeline is not None:
                error.timeline = read_timeline(bounded(error.timeline))
            raise

    def _open(self) -> OpenRequest:
        if self._opened is None:
            caller = self._router.keys.admit(credentials_of(self._metadata), Scope.GENERATE)
            trace = dict(self._metadata).get(TRACEPARENT, "")
            self._opened = self._router.dispatcher.open(self._request, self._timeout_s, caller, trace)
        return self._opened

    def cancel(self) -> None:
        if self._opened is not None:
            self._opened.stop(Cancelled("the client went away"))


@dataclass
class Answer:
    """All that the application has sent. pieces: with the event loop's time of each, of the head "" first."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        if "type" in self.json:  # Anthropic's have no param, and begin with it
            told = self.json["error"]
            assert (list(self.json), list(told)) == (["type", "error"], ["type", "message"])
            return {**told, "param": told["message"].partition(":")[0]}
        assert list(self.json) == ["error"]
        assert [one for one in self.json["error"] if one != "timeline"] == ["message", "type", "param", "code"]
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Each event's object; the last one is the text [DONE]."""
        assert self.headers["content-type"] == "text/event-stream"
        *lines, last = self.body.decode().split("\n\n")
        assert last == ""
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) if line != "data: [DONE]" else line[6:] for line in lines]

    @property
    def named_events(self) -> list[Any]:
        """Each event's object, which has the event's name as its type."""
        assert self.headers["content-type"] == "text/event-stream"
        *events, last = self.body.decode().split("\n\n")
        assert last == ""
        named = [event.removeprefix("event: ").split("\ndata: ") for event in events]
        read = [(name, json.loads(data)) for name, data in named]
        assert all(name == one["type"] for name, one in read)
        return [one for _, one in read]


class LocalDoor:
    """The application before a router. `gone` makes the clients of all later requests go.

    pause_s: of clients after each piece of an answer.
    """

    def __init__(self, router: Router, keys: KeyList) -> None:
        self.client = LocalClient(router)
        self.operator = LocalOperator(router)
        self.watch = ClusterWatch(self.operator)
        self.app = Gateway([self.client], KeyRing(keys), Metrics(), self.watch)
        self.gone = asyncio.Event()
        self.pause_s = 0.0

    async def get(self, path: str, key: str = "") -> Answer:
        return await self.send("GET", path, b"", {"authorization": f"Bearer {key}"} if key else {})

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send("POST", path, data, {"content-type": "application/json", **given})

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        given = headers if "transfer-encoding" in headers else {"content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "method": method,
            "raw_path": path.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }
        parts = [body[start : start + 4096] for start in range(0, len(body), 4096)] or [b""]
        answer = Answer()

        async def receive() -> MutableMapping[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def take(message: MutableMapping[str, Any]) -> None:
            answer.pieces.append((asyncio.get_running_loop().time(), message.get("body", b"")))
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            answer.body += message["body"]
            answer.is_whole = not message["more_body"]
            if self.pause_s:
                await asyncio.sleep(self.pause_s)

        async with asyncio.timeout(WAIT_S):
            await self.app(scope, receive, take)
        return answer


class LocalGateway(LocalDoor):
    """The application, and the cluster behind it."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster.router, cluster.router.config.keys)
        self.cluster = cluster


@asynccontextmanager
async def serving(
    keys: KeyList = NO_KEYS, config: RouterConfig = CONFIG, renderer: Renderer | None = None
) -> AsyncIterator[LocalGateway]:
    """A gateway before a prefill and a decode worker; the model is called `fake`."""
    async with running(1, 1, replace(config, keys=keys), renderer) as cluster:
        gateway = LocalGateway(cluster)
        yield gateway
        await gateway.client.close()
