#!/usr/bin/env bash
# Adds this machine to a Ray cluster, as a node for workers of one role of Baton.
#   deploy/join.sh HEAD:PORT --role prefill|decode [--workers N] [RAY_OPTION...]
# It offers N (1) of the resource of that name; workers ask for one each by the settings of deploy/two-pools.example.toml.
# The token of Ray, and the model's folder at the same path, must be here already. `ray stop` ends the node.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '3s/^# *//p' "$0" >&2; exit 2; }
head="${1:-}" role="" workers=1
[ $# -gt 0 ] && shift
options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --role) role="${2:-}"; shift 2 || usage ;;
        --workers) workers="${2:-}"; shift 2 || usage ;;
        *) options+=("$1"); shift ;;
    esac
done
[[ "$head" =~ ^[^:]+:[0-9]+$ && "$role" =~ ^(prefill|decode)$ && "$workers" =~ ^[1-9][0-9]*$ ]] || usage
exec bash deploy/ray_node.sh --address "$head" --resources "{\"$role\": $workers}" "${options[@]}"
