"""Where Prometheus scrapes a router: HTTP on a port of its own, on threads of its own."""

import logging
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from wire.errors import ConfigError

log = logging.getLogger(__name__)

MAX_SCRAPERS = 8
SOCKET_TIMEOUT_S = 5.0
STOP_POLL_S = 0.1


class MetricsServer:
    """Serves a registry, at any path, between `start` and `stop`. A scraper that is slow holds up nobody but itself."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Port 0 takes a free one. Raises ConfigError if the port cannot be had."""
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise ConfigError(f"port {port} of {host} cannot be had; is it in use?") from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="metrics", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the port. Blocks for a moment."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    """At most so many scrapers at a time; the connections of others are closed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._slots = threading.BoundedSemaphore(MAX_SCRAPERS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without the look-up of this host's name that HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a scrape broke off", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = SOCKET_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are no events."""
