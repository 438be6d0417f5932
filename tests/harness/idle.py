"""The blocks of an arena that no process uses just now."""

from collections.abc import Callable

from kv_store.node.directory import Directory
from kv_store.node.messages import Block


def visit_idle(directory: Directory, visit: Callable[[list[Block]], None]) -> None:
    """Shows the indexed blocks that no process reads or writes; none begins to before `visit` returns."""
    state = directory.state
    with state:
        visit([block for block in state.blocks() if not state.ledger.num_transfers(block.slot)])
