"""A bare grpc.aio server that turns every request away: what a refusal costs at least."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wire.pb import inference_pb2 as pb
from wire.pb.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from wire.rpc import SERVER_OPTIONS


class RefusingApi(InferenceServicer):
    """Never has room."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        yield pb.GenerateResponse()


async def main() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_InferenceServicer_to_server(RefusingApi(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
