"""The model that a cluster serves, as workers loaded it, and the inputs of its blocks' names."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from wire.block_names import namespace_root
from wire.errors import WireError
from wire.ids import NamespaceRoot
from wire.layout import KVLayout
from wire.sampling import DEFAULT_MAX_TOKENS, DEFAULTS, SamplingParams
from wire.typed_reader import HexOf, wrong

FINGERPRINT_BYTES = 32
NO_ADAPTER = ""
FULL_CACHE = ""
"""The policy of a cache that keeps every token."""


def check_layout(digits: str) -> None:
    """Raises Misfit for a text that is no encoded layout in hex."""
    try:
        KVLayout.decode(bytes.fromhex(digits))
    except (ValueError, WireError) as error:
        raise wrong("an encoded layout in hex digits", digits) from error


FingerprintHex = Annotated[str, HexOf(FINGERPRINT_BYTES)]
LayoutHex = Annotated[str, check_layout]


@dataclass(frozen=True)
class ServedNamespace:
    """The parts of a namespace root that all tenants of a model share. model: its name, for the operator.

    layout_hex: the layout as encoded when the model was served; a later version may encode it otherwise.
    """

    model: str
    fingerprint_hex: FingerprintHex
    layout_hex: LayoutHex

    @property
    def layout(self) -> KVLayout:
        return KVLayout.decode(bytes.fromhex(self.layout_hex))

    def root_of(self, secret: bytes, tenant: str) -> NamespaceRoot:
        """Derives the root of a tenant's block names."""
        fingerprint, layout = bytes.fromhex(self.fingerprint_hex), bytes.fromhex(self.layout_hex)
        return namespace_root(secret, tenant, fingerprint, layout, NO_ADAPTER, FULL_CACHE)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model as workers loaded it; bytes are in hex. folder: has the tokenizer. aliases: further names.

    text_hex: digest of tokenizer and chat template, by which routers go; empty in records of earlier releases.

    kv_policies: the policies that a request may name; the first is the default. sampling: defaults for unset fields.
    max_chat_tokens: the most tokens of a chat's answer without max_tokens. tool_format, reasoning_format: settings for
    AnswerFormats.of. batch_invariant: tokens depend on no other request, so that a failover promises the very same
    tokens; false on a GPU, and of architectures without native code.
    """

    name: str
    folder: str
    dtype: str
    max_context_len: int
    vocab_size: int
    fingerprint_hex: FingerprintHex
    layout_hex: LayoutHex
    text_hex: str = ""
    aliases: tuple[str, ...] = ()
    kv_policies: tuple[str, ...] = ("full",)
    sampling: SamplingParams = DEFAULTS
    max_chat_tokens: int = DEFAULT_MAX_TOKENS
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    batch_invariant: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def fingerprint(self) -> bytes:
        return bytes.fromhex(self.fingerprint_hex)

    @cached_property
    def layout(self) -> KVLayout:
        return self.namespace.layout

    @property
    def version_hex(self) -> str:
        """The version in an answer: the model's fingerprint, then `-` and the codes of KV, if any."""
        return self.fingerprint_hex + (f"-{self.layout.quantization}" if self.layout.is_quantized else "")

    @property
    def namespace(self) -> ServedNamespace:
        return ServedNamespace(self.name, self.fingerprint_hex, self.layout_hex)
