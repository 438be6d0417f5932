#!/usr/bin/env bash
# Runs clients that people have, unmodified, against the HTTP and gRPC ports of real clusters that it starts, of SmolLM2: installs them
# into an environment of their own first (BATON_CLIENTS_VENV names its folder, .venv-clients), which takes minutes. A client that cannot
# be installed, for want of Node 20's npm too, fails it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${BATON_CLIENTS_VENV:-$PWD/.venv-clients}"
install() {
  local venv="$1"
  shift
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$@"
}
install "$venv" 'openai>=3.4' anthropic litellm 'pydantic-ai-slim[openai]' inspect-ai 'lm-eval[api]' transformers schemathesis
install "$venv/older" langchain-openai instructor anthropic # these two take no newer openai
npm install --silent --no-audit --no-fund --prefix "$venv" openai ai @ai-sdk/openai-compatible zod @bufbuild/buf
"${PYTHON:-python}" -m cli pull smollm2
BATON_NO_SKIP=1 BATON_CLIENTS_VENV="$venv" exec "${PYTHON:-python}" -m pytest -m clients tests/clients "$@"
