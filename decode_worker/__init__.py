"""The worker that turns KV into tokens: its batcher, and its job."""
