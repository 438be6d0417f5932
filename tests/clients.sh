#!/usr/bin/env bash
# Runs clients that people have, unmodified, against the HTTP and gRPC ports of a real cluster that it starts: installs them into an
# environment of their own first (BATON_CLIENTS_VENV names its folder, .venv-clients), which takes minutes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${BATON_CLIENTS_VENV:-$PWD/.venv-clients}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check openai anthropic litellm langchain-openai \
  'lm-eval[api]' transformers schemathesis
if command -v npm > /dev/null; then
  npm install --silent --no-audit --no-fund --prefix "$venv" openai ai @ai-sdk/openai-compatible @bufbuild/buf
fi
BATON_CLIENTS_VENV="$venv" exec "${PYTHON:-python}" -m pytest -m clients tests/clients "$@"
