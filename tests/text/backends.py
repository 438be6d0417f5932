"""Small tokenizers of the kinds that models come with, trained or written down here."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox", "says hello world, 你好 or €5 😀", "and the dog sleeps  on"] * 3


def byte_level(corpus: Sequence[str] = CORPUS) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: pieces that stand for a leading space, raw bytes for what has no piece, a first space taken away."""
    backend = _with_bytes(fuse_unk=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def byte_fallback_unstripped() -> tokenizers.Tokenizer:
    """As Gemma: spaces are pieces, nothing is taken away."""
    backend = _with_bytes(fuse_unk=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5: the decoder drops the first token's leading space."""
    backend = _with_bytes(fuse_unk=False)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "fox", "##es", "##ed", "jump", ",", ".", "n't", "do", "'"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, byte_fallback, byte_fallback_unstripped, metaspace, word_piece)
}


def _with_bytes(fuse_unk: bool) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁▁▁", "a", "e", "h", "l", "o", "x", "he", "ll", "▁he", "hell", "▁hell", "�", "€"]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("he", "ll"), ("▁he", "ll"), ("▁", "▁"), ("▁▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A model folder with the tokenizer's two files."""
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
