"""The worker that turns KV into tokens: its batcher, its lifecycle, its actor."""
