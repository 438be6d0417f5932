"""Between text and token ids: tokenizers, chat templates, grammars, incremental text, stop strings. No torch."""
