"""An ext_proc server that decides nothing: the floor of what grpc.aio costs, to which ours is compared.

As cheap as a grpc.aio server gets: raw bytes, `read` and `write` instead of generators, uvloop, both answers made
beforehand. The second one sets a header, so that Envoy has the same to do.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from extproc.wire.grpc_server import EXT_PROC
from extproc.wire.messages import CONTINUE, Phase


def _routed() -> bytes:
    response = ext_proc.ProcessingResponse()
    header = response.request_body.response.header_mutation.set_headers.add().header
    header.key, header.raw_value = "x-gateway-destination-endpoint", b"127.0.0.1:8000"
    return bytes(response.SerializeToString())


_HEADERS, _BODY = CONTINUE[Phase.REQUEST_HEADERS], _routed()


async def _process(_requests: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
    for answer in (_HEADERS, _BODY):
        if await context.read() is grpc.aio.EOF:
            return
        await context.write(answer)
    await context.read()


async def _serve(address: str) -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_concurrent_streams", 100_000)]
    )
    handlers = {"Process": grpc.stream_stream_rpc_method_handler(_process)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXT_PROC, handlers),))
    server.add_insecure_port(address)
    await server.start()
    gc.collect()
    gc.freeze()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
