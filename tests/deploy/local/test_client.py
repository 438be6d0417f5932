"""The command line's calls to the routers of a cluster."""

import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from deploy.local.client import call_each, call_operator
from tests.deploy.local.test_state import STATE
from wire.pb import cluster_pb2
from wire.pb.cluster_pb2_grpc import ClusterServicer, add_ClusterServicer_to_server
from wire.pools import Addresses

TIMEOUT_S = 10.0


class _Service(ClusterServicer):
    def GetStatus(self, request: cluster_pb2.GetStatusRequest, context: Any) -> cluster_pb2.ClusterStatus:  # noqa: N802
        return cluster_pb2.ClusterStatus(model="small")


def test_a_router_that_is_stopped_is_passed_over_before_the_timeout() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    add_ClusterServicer_to_server(_Service(), server)
    living = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel takes connections, and nothing answers
        hung = f"127.0.0.1:{stopped.getsockname()[1]}"
        state = dataclasses.replace(STATE, addresses=Addresses("", operator=f"{hung},{living}"))
        request, began_s = cluster_pb2.GetStatusRequest(), time.monotonic()
        assert call_operator(state, "GetStatus", request, TIMEOUT_S).model == "small"
        answers = call_each(state, "GetStatus", request, TIMEOUT_S)
        assert {address: one and one.model for address, one in answers.items()} == {hung: None, living: "small"}
        assert time.monotonic() - began_s < TIMEOUT_S
    server.stop(None).wait(TIMEOUT_S)
