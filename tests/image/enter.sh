#!/usr/bin/env bash
# Runs a command in an image's files, as a container runtime does: its first process in new mount and pid namespaces.
#   enter.sh ROOT SHM_SIZE VOLUME USER FOLDER COMMAND...
# ROOT is read-only; only /tmp, /dev/shm and the volume can be written. USER has no capability and gets none. The environment stays. Mounts have Docker's options.
set -euo pipefail
root="$1" shm_size="$2" volume="$3" user="$4" folder="$5"
shift 5
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o "size=$shm_size,mode=1777,nosuid,nodev,noexec" shm "$root/dev/shm"
mount -t tmpfs -o "size=1g,mode=1777,nosuid,nodev,noexec" tmp "$root/tmp"
mount --bind "$volume" "$root/var/lib/baton"
exec chroot "$root" setpriv --reuid="$user" --regid="$user" --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs \
  env --chdir="$folder" "$@"
