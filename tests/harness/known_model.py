"""What clusters of these tests serve: a model whose every answer is known beforehand, and prompts for it."""

from engine.model.hash_model import HashModel
from tests.harness.answer import Reader
from wire.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
MODEL = HashModel(LAYOUT, vocab_size=300)


def prompt_of(number: int) -> tuple[int, ...]:
    """Three full blocks and a tail of two tokens. The prompts of numbers below 200 have no block in common."""
    return tuple((number * 13 + position) % 200 for position in range(50))


async def expect(reader: Reader, number: int, num_tokens: int = 40) -> None:
    """Reads a stream to its end, which is the answer to the prompt of that number."""
    [choice] = await reader.read_all()
    assert choice.token_ids == MODEL.oracle(prompt_of(number), num_tokens)
