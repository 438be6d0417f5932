"""Between text and token ids: tokenizer, UTF-8-safe incremental text, stop strings. No torch, no model."""
