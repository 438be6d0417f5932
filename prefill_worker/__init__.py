"""The worker that turns prompts into KV: its batcher, and its job."""
