#!/usr/bin/env bash
# Two Ray nodes on this machine, each with an arena of its own: prefill on one, decode on the other. One generation, the
# status of both nodes, a clean stop. Arguments go to `baton up`.
set -euo pipefail
cd "$(dirname "$0")/.."

name=two-nodes
work="$(mktemp -d)"
export RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(head -c 32 /dev/urandom | sha256sum | cut -d' ' -f1)}" RAY_AUTH_MODE=token
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
nodes=()

stop() {
    baton down --name "$name" || true
    for pid in $(printf '%s\n' "${nodes[@]}" | tac); do kill "$pid" 2>/dev/null && wait "$pid" || true; done
    rm -rf "$work"
}
trap stop EXIT

# Without --block, Ray would go on in the background.
start() {
    local log="$work/$1.log"; shift
    bash "$@" --node-ip-address 127.0.0.1 --block >"$log" 2>&1 &
    nodes+=($!)
    for _ in $(seq 120); do
        grep -q "Ray runtime started" "$log" && return
        kill -0 "${nodes[-1]}" 2>/dev/null || break
        sleep 0.5
    done
    cat "$log" >&2
    return 1
}

start head deploy/head.sh --port "$port" --resources '{"prefill": 1}'
start decode deploy/join.sh "127.0.0.1:$port" --role decode
baton up --name "$name" --config deploy/two-pools.example.toml --ray-address "127.0.0.1:$port" --grpc-port 0 "$@"
baton generate --name "$name" --temperature 0 "Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55. Question: which room has Clara?"
baton status --name "$name" --check
trap - EXIT
stop
bash deploy/nothing_left.sh "$name"
