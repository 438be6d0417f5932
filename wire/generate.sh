#!/usr/bin/env bash
# Makes wire/pb from proto/. The virtual path wire/pb=proto gives the stubs absolute imports that work in place.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -Iwire/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. \
    wire/pb/inference.proto wire/pb/worker.proto wire/pb/cluster.proto
