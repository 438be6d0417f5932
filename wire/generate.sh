#!/usr/bin/env bash
# Makes wire/pb from proto/. protoc's stubs import one another by bare names; sed puts their package in front.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -Iproto --python_out=wire/pb --pyi_out=wire/pb --grpc_python_out=wire/pb proto/*.proto
sed -i -E 's/^import (inference|worker|cluster)_pb2/from wire.pb import \1_pb2/' wire/pb/*_pb2*.py*
