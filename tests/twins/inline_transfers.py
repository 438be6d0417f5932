"""The twin of transfers on a thread: transfers on the caller's."""

from kv_store.block_store import BlockStore
from kv_store.transfers import NoStore, Transfer


class InlineTransfers(NoStore):
    """Transfers on the caller's thread; `begin` raises an error of the store."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__()
        self._store = store

    def begin(self, transfer: Transfer) -> None:
        self._store.fence()
        self._done.append(transfer.run(self._store))
