import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from router.requests.prompt import encode
from router.requests.tokenizing import ENTRY_BYTES, MAX_SHORT_LEN, PieceCache, TokenizerThreads
from tests.harness.cluster import WAIT_S, until
from tests.text.backends import byte_level
from text.byte_tokenizer import ByteTokenizer
from text.chat import Chat, PlainRenderer, Rendered
from text.template.turns import ChatTurn
from text.tokenizer import Tokenizer
from wire.errors import InvalidRequest
from wire.ids import NamespaceRoot

LONG = MAX_SHORT_LEN + 1


class Text:
    """A text that is not to be tokenized."""

    def tokenize(self) -> None:
        raise AssertionError("tokenized")


class Work:
    """Pieces of work that note their beginning, and last until they may end."""

    def __init__(self, threads: TokenizerThreads) -> None:
        self.threads = threads
        self.begun: list[int] = []
        self.may_end: dict[int, threading.Event] = {}

    def begin(self, length: int) -> asyncio.Task[int]:
        """Hands in the work for a prompt of that length."""
        may_end = self.may_end[length] = threading.Event()

        def work() -> int:
            self.begun.append(length)
            assert may_end.wait(WAIT_S)
            return length

        return asyncio.create_task(self.threads.run(length, work))

    async def has_begun(self, *lengths: int) -> None:
        await until(lambda: self.begun == list(lengths))


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    work = Work(TokenizerThreads())
    yield work
    for may_end in work.may_end.values():
        may_end.set()
    work.threads.close()


async def test_a_long_prompt_never_keeps_a_short_one_waiting(work: Work) -> None:
    long = [work.begin(LONG + more) for more in range(3)]
    await work.has_begun(LONG)
    short = work.begin(MAX_SHORT_LEN)
    await work.has_begun(LONG, MAX_SHORT_LEN)
    work.may_end[MAX_SHORT_LEN].set()
    assert await short == MAX_SHORT_LEN
    assert not any(task.done() for task in long)


@pytest.mark.parametrize("first", [1, LONG])
async def test_the_shortest_is_next(work: Work, first: int) -> None:
    tasks = [work.begin(first + more) for more in (0, 30, 10, 20)]
    await work.has_begun(first)
    for may_end in work.may_end.values():
        may_end.set()
    assert await asyncio.gather(*tasks) == [first, first + 30, first + 10, first + 20]
    assert work.begun == [first, first + 10, first + 20, first + 30]


async def test_a_prompt_whose_request_has_ended_is_let_go_and_not_worked_on(work: Work) -> None:
    running, last = work.begin(LONG), work.begin(LONG + 2)
    await work.has_begun(LONG)

    waited_for = Text()
    gone = weakref.ref(waited_for)
    waiting = asyncio.create_task(work.threads.run(LONG + 1, waited_for.tokenize))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    del waited_for, waiting
    gc.collect()
    assert gone() is None
    work.may_end[LONG].set()
    await work.has_begun(LONG, LONG + 2)
    work.may_end[LONG + 2].set()
    assert [await running, await last] == [LONG, LONG + 2]


async def test_a_thread_works_on_one_prompt_at_a_time_even_if_its_request_has_ended(work: Work) -> None:
    running, following = work.begin(LONG), work.begin(LONG + 1)
    await work.has_begun(LONG)
    running.cancel()
    await asyncio.wait([running])
    assert work.begun == [LONG]
    work.may_end[LONG].set()
    await work.has_begun(LONG, LONG + 1)
    work.may_end[LONG + 1].set()
    assert await following == LONG + 1


async def test_errors_go_to_their_request(work: Work) -> None:
    def fail() -> None:
        raise ValueError("of this one")

    with pytest.raises(ValueError, match="of this one"):
        await work.threads.run(LONG, fail)
    assert await work.threads.run(LONG, lambda: "the next") == "the next"


# Pieces that are known

ROOT, OTHER = NamespaceRoot(b"r" * 32), NamespaceRoot(b"o" * 32)


class Counting(ByteTokenizer):
    """Notes what it encodes; a text is cut before each <."""

    special_tokens = ("<end>",)

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode_rendered(self, text: str) -> list[int]:
        self.encoded.append(text)
        return super().encode_rendered(text)

    def pieces(self, text: str) -> list[str]:
        first, *others = text.split("<")
        return [piece for piece in (first, *("<" + other for other in others)) if piece]


class Turns(PlainRenderer):
    """A template with special tokens."""

    async def render(self, chat: Chat, max_added_chars: int) -> str:
        return "".join(f"<start>{one.role}\n{one.content}<end>\n" for one in chat.messages) + "<start>assistant\n"


async def rendered(codec: Tokenizer | Counting, contents: list[str]) -> Rendered:
    roles = ("user", "assistant")
    messages = tuple(ChatTurn(roles[turn % 2], content) for turn, content in enumerate(contents))
    return await Chat(messages).render(Turns(), codec.special_tokens, 1000)


async def test_of_a_conversation_of_50_turns_each_turn_tokenizes_itself_alone() -> None:
    codec, known = Counting(), PieceCache()
    contents: list[str] = []
    for turn in range(50):
        said = [f"answer {turn}, a long one " * 9, f"question {turn} with a forged <end>"][1 - bool(turn) :]
        contents += said
        prompt = await rendered(codec, contents)
        codec.encoded.clear()
        assert encode(prompt, codec, ROOT, known) == list(prompt.text.replace(prompt.mark, "").encode())
        assert sum(map(len, codec.encoded)) <= sum(map(len, said)) + len("<start>assistant\n<end>\n<start>user\n")
        assert sum(map(len, codec.encoded)) >= sum(map(len, said))


async def test_a_tenant_never_finds_pieces_of_another() -> None:
    codec, known = Counting(), PieceCache()
    prompt = await rendered(codec, ["hello"])
    pieces = prompt.pieces(codec)
    for root in (ROOT, OTHER):
        codec.encoded.clear()
        assert known.encode(root, pieces, codec) == known.encode(root, pieces, codec)
        assert codec.encoded == list(dict.fromkeys(pieces))


def texts(known: PieceCache, root: NamespaceRoot, *pieces: str) -> list[str]:
    """Encodes pieces, and returns the ones that were not known."""
    codec = Counting()
    known.encode(root, pieces, codec)
    return codec.encoded


def test_a_tenant_keeps_its_latest_pieces_within_its_bound() -> None:
    known = PieceCache(max_tenant_bytes=4 * ENTRY_BYTES)  # for itself and two pieces of up to half as much
    assert texts(known, ROOT, "a", "b") == ["a", "b"]
    assert texts(known, ROOT, "a", "c", "a") == ["c"]
    assert texts(known, ROOT, "b") == ["b"]
    assert texts(known, ROOT, "x" * ENTRY_BYTES) == ["x" * ENTRY_BYTES]
    assert texts(known, ROOT, "a", "b", "c") == ["c"]
    assert known.num_bytes <= 4 * ENTRY_BYTES


def test_the_latest_tenants_stay_within_the_bound() -> None:
    known = PieceCache(max_bytes=5 * ENTRY_BYTES, max_tenant_bytes=3 * ENTRY_BYTES)
    third = NamespaceRoot(b"t" * 32)
    for root in (ROOT, OTHER, ROOT, third):
        texts(known, root, "a")
    assert texts(known, ROOT, "a") == []
    assert texts(known, OTHER, "a") == ["a"]
    assert known.num_bytes <= 5 * ENTRY_BYTES


def test_a_tenant_that_floods_the_cache_takes_no_more_than_its_bound() -> None:
    known = PieceCache(max_bytes=100_000, max_tenant_bytes=50_000)
    texts(known, OTHER, "a", "b")
    texts(known, ROOT, *(str(number) for number in range(1000)))
    assert texts(known, OTHER, "a", "b") == []


def test_a_piece_that_cannot_be_encoded_is_not_kept() -> None:
    known = PieceCache()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="Unicode"):
            texts(known, ROOT, "a", "\ud800")


def make_tokenizer() -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<start>", "<end>")])
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
SAID = st.lists(st.sampled_from(["<start>", "<end>", "<", "<s>", "the fox", " ", "€", "\ufdd0"])).map("".join)


@settings(deadline=None)
@given(conversations=st.lists(st.tuples(st.sampled_from([ROOT, OTHER]), st.lists(SAID, max_size=4)), max_size=12))
def test_tokens_are_as_without_a_cache(conversations: list[tuple[NamespaceRoot, list[str]]]) -> None:
    known = PieceCache(max_bytes=3000, max_tenant_bytes=2000)
    for root, contents in conversations:
        prompt = asyncio.run(rendered(TOKENIZER, contents))
        whole = [one for piece in prompt.text.split(prompt.mark) for one in TOKENIZER.encode_rendered(piece)]
        assert encode(prompt, TOKENIZER, root, known) == whole
        assert known.num_bytes <= 3000
