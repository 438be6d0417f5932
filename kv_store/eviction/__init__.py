"""The order in which a ledger evicts cached pages or slots."""
