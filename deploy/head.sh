#!/usr/bin/env bash
# Starts the first node of a Ray cluster on this machine: controller and router of Baton will run here, workers elsewhere.
#   deploy/head.sh [--supervise] [RAY_OPTION...]      such as --port 6379, --node-ip-address IP, --block
# Then deploy/join.sh on other machines, and here
#   RAY_AUTH_MODE=token baton up --ray-address HOST:PORT --config deploy/two-pools.example.toml
# The environment is that of deploy/environment.sh. `ray stop` ends the node. With --supervise this command stays, starts the node again
# whenever it ends, and ends it at SIGTERM: the other nodes outlive a head that dies (docs/operating.md, "A head that may die").
set -euo pipefail
cd "$(dirname "$0")/.."

# Makes ~/.ray/auth_token, readable for its owner, where no token is given.
[ -n "${RAY_AUTH_TOKEN:-}" ] || (umask 077 && ray get-auth-token --generate >/dev/null)
if [ "${1:-}" = --supervise ]; then
    shift
    port=6379 last=
    for option in "$@"; do
        [ "$last" != --port ] || port="$option"
        case "$option" in --port=*) port="${option#--port=}" ;; esac
        last="$option"
    done
    # Ray's tables are files (RocksDB), and a head at the same port takes them over. Ray refuses a port that its note of the last
    # cluster names while another node of that cluster runs on this machine.
    export RAY_gcs_storage=rocksdb
    head='rm -f "${RAY_TMPDIR:-/tmp}/ray/ray_current_cluster"; exec bash deploy/ray_node.sh --head --include-dashboard=false --block "$@"'
    exec python -m deploy.local.head_supervisor "$port" bash -c "$head" head "$@"
fi
exec bash deploy/ray_node.sh --head --include-dashboard=false "$@"
