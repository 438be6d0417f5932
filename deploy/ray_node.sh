#!/usr/bin/env bash
# Starts Ray on this machine as one node of a cluster, for deploy/head.sh and deploy/join.sh. Arguments go to `ray start`.
# Nodes know one another by a token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, the same everywhere.
set -euo pipefail

token="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
if [ -z "${RAY_AUTH_TOKEN:-}" ] && ! [ -s "$token" ]; then
    echo "ray_node: no token: copy $token from the head to this machine, or set RAY_AUTH_TOKEN" >&2
    exit 78
fi
# Ray runs whatever it is sent, and listens on the network. Its actors are no background work, and need no large object store.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
# Seconds that processes of a node live without the head's control store: Ray's own 60 end them while a supervised head is away.
export RAY_gcs_rpc_server_reconnect_timeout_s="${RAY_gcs_rpc_server_reconnect_timeout_s:-300}"
exec ray start --object-store-memory 83886080 --disable-usage-stats "$@"
