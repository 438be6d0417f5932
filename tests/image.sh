#!/usr/bin/env bash
# Builds the container image with buildah on a base that mmdebstrap makes, and runs it as a container runtime would: a read-only root,
# another user than root. Needs root, Debian's archive, a package index, and 8 GB; the first time takes ten minutes. BATON_IMAGE_FOLDER
# names a folder for base, wheels and images, in the user's cache else. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "tests/image.sh: $*" >&2; exit 1; }
folder="${BATON_IMAGE_FOLDER:-${XDG_CACHE_HOME:-$HOME/.cache}/baton-image}"
python="${PYTHON:-python3}" release=bookworm
[ "$(id -u)" = 0 ] || fail "only root may mount an image's files here"
unshare --mount --pid --fork true 2>/dev/null || fail "this system gives no mount and pid namespaces (unshare), without which nothing is isolated"
"$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" || fail "$python is not Python 3.11, as $release has it: set PYTHON to one"
if ! command -v buildah mmdebstrap > /dev/null; then
  command -v apt-get > /dev/null || fail "there is no buildah or no mmdebstrap, and no apt-get to install them with"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends buildah mmdebstrap; } > /dev/null ||
    fail "buildah and mmdebstrap could not be installed"
fi

mkdir -p "$folder"
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }
if ! buildah inspect --type image baton-base > /dev/null 2>&1; then
  mmdebstrap --quiet --variant=minbase "$release" "$folder/base.tar" || fail "mmdebstrap could make no base: is Debian's archive in reach?"
  base="$(buildah from scratch)"
  buildah add --quiet "$base" "$folder/base.tar" / > /dev/null
  buildah commit --quiet --rm "$base" baton-base > /dev/null
  rm "$folder/base.tar"
fi
# async-timeout: redis wants it with a Python before 3.11.3, as bookworm's is.
"$python" -m pip wheel -qq --disable-pip-version-check --wheel-dir "$folder/wheels" . async-timeout ||
  fail "the Python packages could not be had"
buildah build --quiet --format docker -f deploy/docker/Dockerfile --build-arg BASE=localhost/baton-base --build-arg PIP_NO_INDEX=1 \
  --build-context "wheels=$folder/wheels" -t baton-image . > "$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; fail "buildah could not build"; }
buildah rmi --prune > /dev/null 2>&1 || true
BATON_IMAGE_FOLDER="$folder" "$python" -m pytest -m image tests/image "$@"
echo "$folder/figures.json:" && cat "$folder/figures.json"
