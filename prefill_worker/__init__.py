"""The worker that turns prompts into KV: its batcher, its job, its actor."""
