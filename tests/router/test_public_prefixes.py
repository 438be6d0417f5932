"""Texts that the operator declares public, as tokens of prompts and of system messages."""

from dataclasses import replace

import pytest

from router.config import RouterConfig
from router.requests.tokenizing import NO_PREFIXES, PublicPrefixes
from tests.harness.fake_cluster import CONFIG
from text.byte_tokenizer import ByteTokenizer
from text.chat import NoRenderer, PlainRenderer
from wire.block_names import PublicPart
from wire.errors import ConfigError
from wire.ids import PUBLIC, TENANT

TEXT = "You are a parrot."
RENDERED = f"system: {TEXT}\nuser: "
SIZE = CONFIG.model.layout.block_size


def config(*texts: str) -> RouterConfig:
    return replace(CONFIG, settings=replace(CONFIG.settings, public_prefixes=texts))


def part_of(prefixes: PublicPrefixes, text: str) -> PublicPart | None:
    return prefixes.part_of(ByteTokenizer().encode(text), SIZE)


async def test_the_longest_declared_prefix_counts_in_whole_blocks() -> None:
    prefixes = await PublicPrefixes.make(config(TEXT, f"{TEXT} Speak!"), ByteTokenizer(), PlainRenderer())
    root = CONFIG.root_of(PUBLIC)
    for text, length in ((f"{TEXT} Who?", len(TEXT)), (f"{TEXT} Speak! Now", len(TEXT) + 7), (TEXT, len(TEXT))):
        assert part_of(prefixes, text) == PublicPart(root, length // SIZE)
    assert part_of(prefixes, f"{RENDERED}hello\nassistant:") == PublicPart(root, len(RENDERED) // SIZE)
    assert part_of(prefixes, "You are a parr") is None
    assert part_of(prefixes, f" {TEXT}") is None


async def test_without_a_template_texts_are_beginnings_of_prompts_only() -> None:
    prefixes = await PublicPrefixes.make(config(TEXT), ByteTokenizer(), NoRenderer())
    assert prefixes.token_ids == (tuple(ByteTokenizer().encode(TEXT))[: len(TEXT) // SIZE * SIZE],)


@pytest.mark.parametrize("text", ["", "abc"])
async def test_what_fills_no_block_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"public_prefixes\[0\]"):
        await PublicPrefixes.make(config(text), ByteTokenizer(), NoRenderer())


async def test_no_tenant_has_the_public_root_and_nothing_is_public_unless_declared() -> None:
    assert not TENANT.fullmatch(PUBLIC)
    prefixes = await PublicPrefixes.make(CONFIG, ByteTokenizer(), PlainRenderer())
    assert part_of(prefixes, TEXT * 9) is part_of(NO_PREFIXES, TEXT * 9) is None
