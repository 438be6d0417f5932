"""The pages of a pool given to sequences: allocated and taken back, read from the store, written through."""
