"""A process that reserves slots and writes to them when it is told to: `python -m tests.kv_store.writer_process`.

Arguments: path of the directory's socket, first token of the sequence, number of tokens. Commands come on stdin, one a
line; each is answered with one line. Light to start: it maps the arena by hand.
"""

import mmap
import sys

from kv_store.node.directory_client import DirectoryClient
from tests.kv_store.names import committed, names_of, payload_of
from wire.ids import SlotId


class Writer:
    def __init__(self, path: str, first: int, num_tokens: int) -> None:
        self.client = DirectoryClient(path, timeout_s=30.0)
        self.names = names_of(num_tokens, first)
        self.slots: list[SlotId | None] = []
        self.info = self.client.attach()
        with open(self.info.arena_path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def reserve(self) -> str:
        self.slots = self.client.reserve("writer", self.names, None).slots
        return " ".join(str(slot) for slot in self.slots)

    def write(self) -> str:
        for slot, name in zip(self.slots, self.names, strict=True):
            if slot is not None:
                start, payload = slot * self.info.block_bytes, payload_of(name)
                self.memory[start : start + len(payload)] = payload
        return "written"

    def commit(self) -> str:
        return str(self.client.commit("writer", committed(self.slots, self.names), None))

    def disconnect(self) -> str:
        self.client.close()
        return "disconnected"


def main() -> None:
    writer = Writer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    commands = {
        "reserve": writer.reserve,
        "write": writer.write,
        "commit": writer.commit,
        "disconnect": writer.disconnect,
    }
    for line in sys.stdin:
        sys.stdout.write(commands[line.strip()]() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
