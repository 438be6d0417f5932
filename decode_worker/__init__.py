"""The worker that turns KV into tokens: its batcher, its job, its actor."""
