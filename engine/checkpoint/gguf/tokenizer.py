"""tokenizer.json and tokenizer_config.json, from the vocabulary of a GGUF model.

Two kinds, as `tokenizer.ggml.model` says. `gpt2`: merges over bytes; `tokenizer.ggml.pre` names the patterns that cut a
text into words, one after another, each within the pieces of the one before. `llama`: SentencePiece's merges, which
follow from the pieces' scores. llama.cpp's tokenizer, on the same file, is the oracle of the tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.json_fields import JsonFields
from wire.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>")
"""Tokens that end an answer, by name, besides the ids that the file gives."""

_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BREAKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TITLE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER, _LOWER = r"(?:(?![a-z])\p{L})", r"(?:(?![A-Z])\p{L})"


@dataclass(frozen=True)
class _Words:
    """patterns: regular expressions that cut a text into words. ignores_merges: needs no merges for a word that is a
    token.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = _Words((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_BREAKS}",), True, True)
_CL100K = _Words(_LLAMA3.patterns)
_O200K = _Words(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_TITLE}*{_SMALL}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_TITLE}+{_SMALL}*{_CONTRACTIONS}?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_QWEN2 = _Words((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_BREAKS}",))
_SMOLLM = _Words((r"\p{N}", _GPT2))
_PLAIN = _Words((_GPT2,))
_DEEPSEEK_CODER = _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"))
_TEKKEN = _Words(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    True,
)
_DEFAULT = _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
WORDS: dict[str, _Words] = {
    "default": _DEFAULT,
    "deepseek-coder": _DEEPSEEK_CODER,
    "tekken": _TEKKEN,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _CL100K),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SMOLLM),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _PLAIN),
}
"""The ways to cut words, by `tokenizer.ggml.pre`."""


class GgufTokenizer:
    """The vocabulary of a GGUF model. Raises ModelError, naming key or token, if it cannot be served."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._fields = JsonFields(
            {key.removeprefix("tokenizer."): value for key, value in metadata.items()}, f"{source}: tokenizer"
        )
        self._model = self._fields.text("ggml.model", "")
        if self._model not in ("gpt2", "llama"):
            raise self._fields.wrong("ggml.model", "gpt2 or llama: no other tokenizer is supported")
        pre = self._fields.text("ggml.pre", "default")
        if self._model == "gpt2" and pre not in WORDS:
            raise self._fields.wrong("ggml.pre", f"one of {', '.join(sorted(WORDS))}")
        self._words = WORDS[pre] if self._model == "gpt2" else _Words((), adds_bos=True)
        self._tokens: list[str] = self._list("ggml.tokens", str)
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        self._kinds: list[int] = self._list("ggml.token_type", int) or [_NORMAL] * len(self._tokens)
        if not self._tokens or len(self._kinds) != len(self._tokens):
            raise self._fields.wrong("ggml.token_type", f"a type for each of {len(self._tokens)} tokens")
        if len(self._ids) != len(self._tokens):
            twice = next(token for token_id, token in enumerate(self._tokens) if self._ids[token] != token_id)
            raise ModelError(f"{source}: the tokenizer has the token {twice[:64]!r} twice")

    @property
    def template(self) -> str | None:
        """The chat template, if there is one."""
        return self._fields.text("chat_template", "") or None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, the file's own first."""
        own = [self._id_of(f"ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
        others = [one for one in map(self._ids.get, _ENDS) if one is not None and self._kinds[one] == _CONTROL]
        return tuple(dict.fromkeys(one for one in (*own, *others) if one is not None))

    def config(self) -> dict[str, Any]:
        """Makes tokenizer_config.json's object: the tokens that have a role."""
        roles = ((role, self._id_of(f"ggml.{name}_token_id")) for role, name in _ROLES.items())
        return {role: self._tokens[token_id] for role, token_id in roles if token_id is not None}

    def definition(self) -> dict[str, Any]:
        """Makes tokenizer.json's object."""
        added = [
            {"id": token_id, "content": self._tokens[token_id], "special": kind != _USER_DEFINED, **_AS_IT_STANDS}
            for token_id, kind in enumerate(self._kinds)
            if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and self._model == "llama")
        ]
        parts = self._byte_level() if self._model == "gpt2" else self._sentence_pieces()
        return {"version": "1.0", "added_tokens": added, "post_processor": self._post_processor(), **parts}

    def _byte_level(self) -> dict[str, Any]:
        merges = [merge.split(" ") for merge in self._list("ggml.merges", str)]
        if any(len(merge) != 2 for merge in merges):
            raise self._fields.wrong("ggml.merges", "two parts in each merge")
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self._words.patterns
        ]
        spelled = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, spelled]},
            "decoder": spelled,
            "model": self._bpe(merges, ignore_merges=self._words.ignores_merges),
        }

    def _sentence_pieces(self) -> dict[str, Any]:
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        unescape = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        first: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        has_prefix = self._fields.flag("ggml.add_space_prefix", True)
        normalizers = [*([{"type": "Prepend", "prepend": "▁"}] if has_prefix else []), escape]
        decoders = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}, *([first] if has_prefix else [])]
        unknown = next((self._tokens[i] for i, kind in enumerate(self._kinds) if kind == _UNKNOWN), None)
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(list(self._merges_by_score()), unk_token=unknown, fuse_unk=True, byte_fallback=True),
        }

    def _merges_by_score(self) -> Iterator[list[str]]:
        """Yields each pair of tokens that joins to a token, the likeliest token first, its pairs by their cut from the
        left.
        """
        scores: list[float] = self._list("ggml.scores", float)
        if len(scores) != len(self._tokens):
            raise self._fields.wrong("ggml.scores", f"a score for each of {len(self._tokens)} tokens")
        for token_id in sorted(range(len(scores)), key=lambda one: (-scores[one], one)):
            token = self._tokens[token_id] if self._kinds[token_id] in (_NORMAL, _USER_DEFINED, _UNUSED) else ""
            pairs = [[token[:cut], token[cut:]] for cut in range(1, len(token))]
            yield from (pair for pair in pairs if pair[0] in self._ids and pair[1] in self._ids)

    def _bpe(self, merges: Sequence[Sequence[str]], **settings: Any) -> dict[str, Any]:
        return {"type": "BPE", "vocab": self._ids, "merges": merges, **settings}

    def _post_processor(self) -> dict[str, Any] | None:
        adds_bos = self._fields.flag("ggml.add_bos_token", self._words.adds_bos)
        adds_eos = self._fields.flag("ggml.add_eos_token", False)
        first = self._id_of("ggml.bos_token_id") if adds_bos else None
        last = self._id_of("ggml.eos_token_id") if adds_eos else None
        around = {self._tokens[one]: one for one in (first, last) if one is not None}
        if not around:
            return None
        text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        before, after = (
            [] if one is None else [{"SpecialToken": {"id": self._tokens[one], "type_id": 0}}] for one in (first, last)
        )
        tokens = {name: {"id": name, "ids": [one], "tokens": [name]} for name, one in around.items()}
        return {
            "type": "TemplateProcessing",
            "single": [*before, text, *after],
            "pair": [*before, text, *after, second],
            "special_tokens": tokens,
        }

    def _id_of(self, key: str) -> int | None:
        value = self._fields.raw(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self._tokens):
            raise self._fields.wrong(key, f"a token id below {len(self._tokens)}")
        return value

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._fields.raw(key)
        if value is not None and (not isinstance(value, list) or not all(type(one) is kind for one in value)):
            raise self._fields.wrong(key, f"an array of {kind.__name__}")
        return value or []


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_AS_IT_STANDS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
