#!/usr/bin/env bash
# Says what a stopped cluster has left behind: processes, shared memory, files. Exit code 1 if there is anything.
name="${1:-default}"
left="$(
    pgrep -af "[b]aton-$name(\b|/)" | sed 's/^/process /'
    find /dev/shm /tmp -maxdepth 1 -name "baton-$name*" 2>/dev/null
)"
if [ -n "$left" ]; then
    printf 'left behind by %s:\n%s\n' "$name" "$left" >&2
    exit 1
fi
echo "Nothing is left behind: no process, no shared memory, no files."
