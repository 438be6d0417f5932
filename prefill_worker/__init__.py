"""The worker that turns prompts into KV: its batcher, its lifecycle, its actor."""
