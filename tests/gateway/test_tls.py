"""TLS and mutual TLS at both doors, with certificates that change while they serve."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from baton import AsyncClient
from deploy.plan.authority import Authority
from gateway.actor import GatewayActor
from gateway.config import GatewayConfig
from httpd.connection import MAX_STALL_S
from router.ports.server import RouterServer
from tests.harness.fake_cluster import CONFIG, FakeCluster
from tests.router.test_keys import ACME_TEXT, LISTED
from wire.errors import BatonError, ConfigError, Unavailable
from wire.trust.certificates import Certificates, TlsFiles
from wire.trust.identity import Identity
from wire.typed_reader import to_json

HOST = "127.0.0.1"
OLD, NEW, CLIENTS = Authority.make(), Authority.make(), Authority.make()


@dataclass
class Doors:
    """Addresses of both doors, and the files that they go by."""

    grpc: str
    local: str
    http: str
    files: TlsFiles

    def install(self, identity: Identity) -> None:
        """Replaces certificate and key as an operator's tools do."""
        for path, text in ((self.files.certificate, identity.certificate_pem), (self.files.key, identity.key_pem)):
            Path(f"{path}.new").write_text(text)
            os.replace(f"{path}.new", path)

    async def ask_grpc(self, trusted: Authority, shown: Identity | None = None) -> int:
        """Asks the gRPC door on a new connection; returns the number of tokens. Raises Unavailable."""
        pair = (None, None) if shown is None else (shown.key_pem.encode(), shown.certificate_pem.encode())
        tls = grpc.ssl_channel_credentials(trusted.certificate_pem.encode(), *pair)
        async with AsyncClient(self.grpc, api_key=ACME_TEXT, tls=tls, timeout_s=5.0) as client:
            return (await client.generate("hello", max_tokens=2)).usage.completion_tokens

    async def ask_http(self, trusted: Authority, shown: Identity | None = None) -> int:
        """Asks the HTTP door on a new connection; returns the number of tokens. Raises Unavailable."""
        context = ssl.create_default_context(cadata=trusted.certificate_pem)
        if shown is not None:
            context = replace(shown, authority_pem=trusted.certificate_pem).client_context()
        host, port = self.http.split(":")
        body = b'{"prompt": "hello", "max_tokens": 2}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ACME_TEXT}\r\n"
        head += f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(head.encode() + body)
            async with asyncio.timeout(5):
                answer = await reader.read()
            writer.close()
        except (ssl.SSLError, ConnectionError) as error:
            raise Unavailable("no connection") from error
        if not answer:
            raise Unavailable("hung up")
        number = json.loads(answer.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"]
        assert isinstance(number, int)
        return number


@asynccontextmanager
async def serving(folder: Path, client_ca: bool) -> AsyncIterator[Doors]:
    files = TlsFiles(str(folder / "cert"), str(folder / "key"), str(folder / "ca") if client_ca else None)
    (folder / "ca").write_text(CLIENTS.certificate_pem)
    Doors("", "", "", files).install(OLD.issue("door", HOST))
    cluster = FakeCluster(replace(CONFIG, keys=LISTED, tls=files))
    router = RouterServer(cluster.router)
    addresses = await router.start()
    await cluster.resize(1, 1)
    actor = GatewayActor(to_json(GatewayConfig(address=addresses.local, keys=LISTED, tls=files)))
    http = json.loads(await actor.start())["http"]
    try:
        yield Doors(addresses.public, addresses.local, http, files)
    finally:
        await actor.stop()
        await router.stop()


async def test_both_doors_speak_tls_and_follow_their_files(tmp_path: Path) -> None:
    async with serving(tmp_path, client_ca=False) as doors:
        tls = grpc.ssl_channel_credentials(OLD.certificate_pem.encode())
        async with AsyncClient(doors.grpc, api_key=ACME_TEXT, tls=tls, timeout_s=5.0) as before:
            assert (await before.generate("hello", max_tokens=2)).usage.completion_tokens == 2
            for ask in (doors.ask_grpc, doors.ask_http):
                assert await ask(OLD) == 2
                with pytest.raises(Unavailable):
                    await ask(NEW)
            doors.install(NEW.issue("door", HOST))
            for ask in (doors.ask_grpc, doors.ask_http):
                assert await ask(NEW) == 2
                with pytest.raises(Unavailable):
                    await ask(OLD)
            assert (await before.generate("hello", max_tokens=2)).usage.completion_tokens == 2


async def test_files_that_cannot_be_used_leave_the_certificates_before(tmp_path: Path) -> None:
    async with serving(tmp_path, client_ca=False) as doors:
        (tmp_path / "cert").write_text(NEW.issue("door", HOST).certificate_pem)
        for ask in (doors.ask_grpc, doors.ask_http):
            assert await ask(OLD) == 2
        (tmp_path / "key").unlink()
        for ask in (doors.ask_grpc, doors.ask_http):
            assert await ask(OLD) == 2


async def test_a_client_that_never_answers_the_end_of_tls_does_not_hold_the_gateway_up(tmp_path: Path) -> None:
    async with serving(tmp_path, client_ca=False) as doors:
        client = await asyncio.to_thread(_read_one_answer, doors.http)
        began = asyncio.get_running_loop().time()
    with client:
        assert asyncio.get_running_loop().time() - began < MAX_STALL_S


def _read_one_answer(address: str) -> ssl.SSLSocket:
    """Asks for an answer that is the connection's last, reads it, and leaves the connection open."""
    host, port = address.split(":")
    context = ssl.create_default_context(cadata=OLD.certificate_pem)
    client = context.wrap_socket(socket.create_connection((host, int(port)), 5.0), server_hostname=host)
    client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    return client


async def test_clients_show_a_certificate_of_the_authority_of_today(tmp_path: Path) -> None:
    async with serving(tmp_path, client_ca=True) as doors:
        mine, strange = CLIENTS.issue("client", HOST), NEW.issue("client", HOST)
        for ask in (doors.ask_grpc, doors.ask_http):
            assert await ask(OLD, mine) == 2
            for shown in (None, strange):
                with pytest.raises(Unavailable):
                    await ask(OLD, shown)
        (tmp_path / "ca").write_text(NEW.certificate_pem)
        for ask in (doors.ask_grpc, doors.ask_http):
            assert await ask(OLD, strange) == 2
            with pytest.raises(Unavailable):
                await ask(OLD, mine)


async def test_without_tls_nothing_is_said_but_on_this_machine(tmp_path: Path) -> None:
    async with serving(tmp_path, client_ca=True) as doors:
        async with AsyncClient(doors.grpc, api_key=ACME_TEXT, timeout_s=2.0) as client:
            with pytest.raises(BatonError):
                await client.generate("hello", max_tokens=2)
        assert doors.local.startswith("127.0.0.1:")
        async with AsyncClient(doors.local, api_key=ACME_TEXT, timeout_s=5.0) as client:
            assert (await client.generate("hello", max_tokens=2)).usage.completion_tokens == 2
            with pytest.raises(BatonError, match="a valid key is wanted"):
                await client.with_key("").generate("hello", max_tokens=2)


def wrong_files(folder: Path) -> Iterator[TlsFiles]:
    one, other = OLD.issue("a", HOST), OLD.issue("b", HOST)
    contents = {"cert": one.certificate_pem, "key": one.key_pem, "other": other.key_pem, "none": "x", "empty": ""}
    paths = {name: str(folder / name) for name in contents}
    for name, content in contents.items():
        Path(paths[name]).write_text(content)
    yield TlsFiles(paths["cert"], str(folder / "gone"))
    yield TlsFiles(paths["cert"], paths["other"])
    yield TlsFiles(paths["none"], paths["key"])
    yield TlsFiles(paths["empty"], paths["key"])
    yield TlsFiles(paths["cert"], paths["key"], paths["none"])
    yield TlsFiles(paths["cert"], paths["key"], paths["empty"])


def test_files_that_are_no_certificate_are_refused_at_the_start(tmp_path: Path) -> None:
    for files in wrong_files(tmp_path):
        with pytest.raises(ConfigError, match="not a certificate with its key"):
            Certificates(files)
