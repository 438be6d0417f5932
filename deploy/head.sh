#!/usr/bin/env bash
# Starts the first node of a Ray cluster on this machine: controller and router of Baton will run here, workers elsewhere.
#   deploy/head.sh [RAY_OPTION...]            such as --port 6379, --node-ip-address IP, --block
# Then deploy/join.sh on other machines, and here
#   RAY_AUTH_MODE=token baton up --ray-address HOST:PORT --config deploy/two-pools.example.toml
# The environment is that of deploy/environment.sh. `ray stop` ends the node.
set -euo pipefail
cd "$(dirname "$0")/.."

# Makes ~/.ray/auth_token, readable for its owner, where no token is given.
[ -n "${RAY_AUTH_TOKEN:-}" ] || (umask 077 && ray get-auth-token --generate >/dev/null)
exec bash deploy/ray_node.sh --head --include-dashboard=false "$@"
