"""Rules by which a file's `tokenizer.ggml.pre` cuts a text into words, on lines whose words the rules' authors tell."""

import json
from typing import Any

import pytest
import tokenizers

from engine.checkpoint.gguf.tokenizer import GgufTokenizer
from tests.harness.checkpoints import byte_level_tokenizer

LINES = {
    "dbrx": {
        "WE'LL can't 1234567": ["WE", "'LL", " can", "'t", " ", "123", "456", "7"],
        "HTTPServer=>x\n\n  y": ["HTTPServer", "=>", "x", "\n\n", " ", " y"],
        "e.g./path  \n": ["e", ".g", "./", "path", "  \n"],
    },
    "gpt-4o": {
        "WE'LL can't 1234567": ["WE'LL", " can't", " ", "123", "456", "7"],
        "HTTPServer=>x\n\n  y": ["HTTPServer", "=>", "x", "\n\n", " ", " y"],
        "e.g./path  \n": ["e", ".g", "./", "path", "  \n"],
        "camelCase ÄÖÜber": ["camel", "Case", " ÄÖÜber"],
    },
}
RULES = {"dbrx": ("smaug-bpe", "chatglm-bpe", "glm4"), "gpt-4o": ("llama4",)}


def tokenizer_of(rule: str) -> tuple[GgufTokenizer, tokenizers.Tokenizer]:
    vocabulary = byte_level_tokenizer(300).get_vocab()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "tokenizer.ggml.bos_token_id": 0,
    }
    found = GgufTokenizer(metadata, "model.gguf")
    return found, tokenizers.Tokenizer.from_str(json.dumps(found.definition()))


@pytest.mark.parametrize("rule", LINES)
def test_words_are_cut_as_the_rule_says(rule: str) -> None:
    for name in (rule, *RULES[rule]):
        _, found = tokenizer_of(name)
        assert found.pre_tokenizer is not None
        for line, words in LINES[rule].items():
            cut = found.pre_tokenizer.pre_tokenize_str(line)
            assert [line[start:end] for _, (start, end) in cut] == words


@pytest.mark.parametrize("rule", [*LINES, *(name for names in RULES.values() for name in names)])
def test_no_token_is_put_before_a_text_unless_the_file_says_so(rule: str) -> None:
    _, found = tokenizer_of(rule)
    assert len(found.encode("a").ids) == 1
