#!/usr/bin/env bash
# Kills Ray's supervised head under streams of another node. By itself: on a busy machine Ray does not start again. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/environment.sh dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
python -m pytest -n 0 -m head tests/cluster/test_head_killed.py "$@"
