"""The pages of a pool and their sequences: allocation, reads from the store, write-through."""
