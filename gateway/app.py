"""The application: routes, bodies in, answers out. The path of a request is compared as the client wrote it."""

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from baton import AsyncClient
from baton.request import OF_CHATS, Options
from baton.results import Model
from gateway import exchange, fields, formats, messages
from gateway.chat import ChatDialect
from gateway.completions import CompletionsDialect
from gateway.exchange import ClientGone, Pieces, Receive, Reply, Request, Scope, Send, Streamed
from gateway.generation import Dialect, Generation, answer, events
from gateway.messages import MessagesDialect
from gateway.observe import openapi
from gateway.observe.metrics import Metrics
from gateway.observe.watch import PAGE, REQUESTS, ClusterWatch
from gateway.responses import ResponsesDialect
from httpd.errors import HttpError, envelope
from text.answer.formats import AnswerFormats
from wire import errors
from wire.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable, Unreachable
from wire.ids import TRACEPARENT, TraceContext, release
from wire.load.limit import Limit, Pace, Share
from wire.rpc import MAX_MESSAGE_BYTES
from wire.trust import key_ring
from wire.trust.key_ring import KeyRing

SMALL_BYTES = 32 << 10
"""Size up to which a body is parsed at once."""
PARSED_BYTES_PER_S = 16 << 20
"""Rate at which larger bodies are parsed, one after another, with streams between them."""
MAX_READING_BYTES = 64 * MAX_MESSAGE_BYTES
"""Bound on the received bytes of all bodies that are still being read."""
MAX_ANSWER_BYTES = 512 << 20
"""Bound on all unsent answers that are not streamed; a single answer may use all of it."""
READY_TIMEOUT_S = 2.0
NO_ROUTER = "this gateway answers, but its router does not, or the connection to it broke: `baton status` tells of it"
OWNER = "baton"
HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
MODEL_PATH = "/v1/models/"
PATH_TO_FIELDS = {
    "/v1/completions": CompletionsDialect.fields,
    "/v1/chat/completions": ChatDialect.fields,
    "/v1/responses": ResponsesDialect.fields,
    "/v1/messages": MessagesDialect.fields,
    "/v1/messages/count_tokens": MessagesDialect.fields,
    "/tokenize": fields.TOKENIZE,
    "/detokenize": fields.DETOKENIZE,
}

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[bytes | Pieces | Streamed]]

log = logging.getLogger(__name__)


class Gateway:
    """The ASGI application; spreads requests over several clients of one router."""

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        keys: KeyRing,
        metrics: Metrics,
        watch: ClusterWatch | None = None,
        cors_origins: Collection[str] = (),
    ) -> None:
        """watch: the state behind the page; None without a page. cors_origins: see GatewayConfig."""
        self._clients = itertools.cycle(clients)
        self._keys = keys
        self._cors_origins = frozenset(cors_origins)
        self._metrics = metrics
        self._pace = Pace(SMALL_BYTES, PARSED_BYTES_PER_S)
        self.reading = Limit(MAX_READING_BYTES, "bytes of bodies may be on their way")
        self._model: Model | None = None
        self.answering = Limit(MAX_ANSWER_BYTES, "bytes may be in answers that are not streamed")
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/models": ("GET", self._list_models),
            "/v1/completions": ("POST", lambda request: self._generate(CompletionsDialect(), request)),
            "/v1/chat/completions": ("POST", partial(self._chat, ChatDialect)),
            "/v1/responses": ("POST", partial(self._chat, ResponsesDialect)),
            "/v1/messages": ("POST", partial(self._chat, MessagesDialect)),
            "/v1/messages/count_tokens": ("POST", self._count_tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            HEALTH: ("GET", self._health),
            READY: ("GET", self._ready),
            "/version": ("GET", self._version),
            METRICS: ("GET", self._show_metrics),
            "/openapi.json": ("GET", self._openapi),
        }
        self._watched: dict[str, tuple[str, Handler]] = {
            path: ("GET", show) for path, show in (watch.routes if watch else {}).items()
        }

    @property
    def routes(self) -> dict[str, str]:
        """Returns the HTTP method of each path, except models' paths."""
        return {path: method for path, (method, _) in self._routes.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Each failure becomes an error envelope."""
        request = Request(scope, receive)
        reply = Reply(request, send, messages.envelope if request.path in openapi.ERRORS else envelope)
        with self._metrics.open.track_inprogress():
            try:
                request.told += exchange.leave_to_read(request, self._origins)
                self._admit(request)
                handler = self._handler(request)
                if request.method == "POST":
                    await self._read(request)
                await _answer_until_gone(request, _answer(handler, request, reply))
            except Unreachable:
                await reply.fail(Unavailable(NO_ROUTER))
            except Exception as error:
                # No name here outlives it: with its traceback, and this frame in that, it would keep the body.
                await reply.fail(errors.known(error, request_id=request.id))
        path = request.path if request.path in self._routes | self._watched else "other"
        self._metrics.count(path, reply.status, request.left_out.names)
        log.info("answered", extra={"path": path, "status": reply.status, "request_id": request.id})

    def _admit(self, request: Request) -> None:
        """Checks a request's key. Raises Unauthenticated or PermissionDenied.

        Health checks and preflights need no key; the operator's service checks the keys of the page.
        """
        if request.path not in (HEALTH, READY) and not (request.path.startswith(PAGE) or request.is_preflight):
            scope = key_ring.Scope.METRICS if request.path == METRICS else key_ring.Scope.GENERATE
            self._keys.admit(request.credentials, scope)

    def _client(self, request: Request) -> AsyncClient:
        """Returns a client that shows the request's key: the gateway has no key of its own."""
        return next(self._clients).with_key(request.key, TraceContext.parse(request.header(TRACEPARENT) or ""))

    def _handler(self, request: Request) -> Handler:
        """Finds the route. Raises HttpError."""
        is_model, known = request.path.startswith(MODEL_PATH), self._routes | self._watched
        path = REQUESTS if request.path.startswith(f"{REQUESTS}/") else request.path
        method, handler = ("GET", self._show_model) if is_model else known.get(path, ("", None))
        if handler is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "no such path; /v1/chat/completions is one")
        allowed = "GET, HEAD" if method == "GET" else method
        if request.is_preflight:
            request.told += exchange.leave_to_send(request, self._origins, allowed)
            return self._health
        if request.method not in allowed.split(", "):
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"this path wants {method}", allow=allowed)
        return handler

    @property
    def _origins(self) -> frozenset[str]:
        """Origins whose pages may use the model; "*" counts only if the model needs a key."""
        return self._cors_origins - {exchange.ANY_ORIGIN} if self._keys.is_open else self._cors_origins

    async def _read(self, request: Request) -> None:
        try:
            await request.read(self.reading.take)
            await self._pace.wait(request.num_bytes)  # MAX_READING_BYTES bound the wait
            request.parse()
        finally:
            self.reading.release(request.num_bytes)

    async def _chat(
        self, make_dialect: Callable[[AnswerFormats], Dialect], request: Request
    ) -> bytes | Pieces | Streamed:
        return await self._generate(await self._dialect(make_dialect, request), request)

    async def _dialect(self, make: Callable[[AnswerFormats], T], request: Request) -> T:
        model = await self._served_model(self._client(request))
        return make(AnswerFormats(model.tool_format, model.reasoning_format))

    async def _generate(self, dialect: Dialect, request: Request) -> bytes | Pieces | Streamed:
        client = self._client(request)
        taken = request.take(dialect.fields, dialect.wanted, sent=dialect.sent)
        prompts = dialect.take_prompts(taken)
        service_tier = fields.place_by_tier(taken)
        formats.take_format(taken, dialect.sent)
        if (timeout_s := request.timeout_s) is not None:
            taken["timeout_s"] = timeout_s
        is_streamed, usage = taken.pop("stream", False), taken.pop("stream_options", None)
        if usage is not None and not is_streamed:
            raise InvalidRequest("stream_options", "wants stream to be true")
        model = taken.get("model") or (await self._served_model(client)).name
        request.wants_timeline, returns_ids = taken.pop("timeline", False), taken.pop("return_token_ids", False)
        hides_prompt = returns_ids and not taken.get("echo")
        if returns_ids:
            taken["echo"] = True
        generation = Generation(
            request_id=request.id,
            model=model,
            prompts=prompts,
            options=cast(Options, taken),
            usage=usage or {},
            service_tier=service_tier,
            timeline=request.wants_timeline,
            returns_ids=returns_ids,
            hides_prompt=hides_prompt,
            headers=request.told,
        )
        generation.require_bounded()
        if is_streamed:
            return events(generation, dialect, client)
        return await answer(generation, dialect, client, request.held.enter_context(Share(self.answering)))

    async def _tokenize(self, request: Request) -> bytes:
        client, taken = self._client(request), request.take(fields.TOKENIZE, sent={"text": "prompt"})
        if ("prompt" in taken) == ("messages" in taken):
            raise InvalidRequest("prompt", "give either a prompt or messages")
        model = await self._find(client, taken.get("model"))
        tokens = await client.tokenize(taken["messages"] if "messages" in taken else taken["prompt"])
        described = {"count": len(tokens.ids), "max_model_len": model.max_context_len, "tokens": tokens.ids}
        if taken.get("return_token_strs"):
            described["token_strs"] = [one.decode(errors="replace") for one in tokens.texts]
        return json.dumps(described).encode()

    async def _count_tokens(self, request: Request) -> bytes:
        dialect = await self._dialect(MessagesDialect, request)
        taken = request.take(dialect.fields, dialect.wanted, sent=dialect.sent)
        [prompt] = dialect.take_prompts(taken)
        client = self._client(request)
        await self._find(client, taken.get("model"))
        tokens = await client.tokenize(prompt, **{name: taken[name] for name in OF_CHATS if name in taken})
        return json.dumps({"input_tokens": len(tokens.ids)}).encode()

    async def _detokenize(self, request: Request) -> bytes:
        client, taken = self._client(request), request.take(fields.DETOKENIZE, "tokens", sent={"token_ids": "tokens"})
        await self._find(client, taken.get("model"))
        return json.dumps({"prompt": await client.detokenize(taken["tokens"])}).encode()

    async def _list_models(self, request: Request) -> bytes:
        models = await self._client(request).list_models()
        return json.dumps({"object": "list", "data": list(map(_describe, models))}).encode()

    async def _show_model(self, request: Request) -> bytes:
        name = unquote(request.path.removeprefix(MODEL_PATH))
        return json.dumps(_describe(await self._find(self._client(request), name))).encode()

    async def _find(self, client: AsyncClient, name: str | None) -> Model:
        """Returns a model by name; without a name, the served model. Raises ModelNotFound."""
        models = await client.list_models()
        for model in models:
            if name in (None, model.name):
                return model
        served = ", ".join(model.name for model in models)
        raise ModelNotFound(f"model: no model of that name is served, but {served}", param="model")

    async def _served_model(self, client: AsyncClient) -> Model:
        """Returns the served model; asks the router once, for a cluster never changes its model."""
        self._model = self._model or (await client.list_models())[0]
        return self._model

    async def _health(self, _: Request) -> bytes:
        return b"{}"

    async def _ready(self, _: Request) -> bytes:
        """Raises Unavailable while the router does not answer."""
        try:
            await next(self._clients).require_ready(READY_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise Unavailable("the router does not answer") from error
        return b"{}"

    async def _version(self, _: Request) -> bytes:
        return json.dumps({"version": release()}).encode()

    async def _openapi(self, _: Request) -> bytes:
        readable = (path for path, (method, _) in self._routes.items() if method == "GET")
        return openapi.describe(PATH_TO_FIELDS, (*readable, f"{MODEL_PATH}{{model}}"))

    async def _show_metrics(self, request: Request) -> bytes:
        return await self._metrics.page(request.key)


async def _answer(handler: Handler, request: Request, reply: Reply) -> None:
    with request.held:
        answered = await handler(request)
        if isinstance(answered, bytes | list):
            await reply.whole([answered] if isinstance(answered, bytes) else answered)
            return
        async with aclosing(answered.events):
            await reply.stream(answered)


async def _answer_until_gone(request: Request, answering: Coroutine[Any, Any, None]) -> None:
    """Waits for an answer; cancels it when its client goes, and then raises Cancelled."""
    tasks = [asyncio.create_task(answering), asyncio.create_task(request.gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            tasks[1].result()  # raises what is wrong with a body that nothing asked for
            raise ClientGone("the client went away")
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        tasks.clear()  # of an error's traceback this frame is a part, and its task a holder


def _describe(model: Model) -> dict[str, Any]:
    named = {"id": model.name, "object": "model", "created": 0, "owned_by": OWNER}
    return named | {"root": model.name, "parent": None, "max_model_len": model.max_context_len}
