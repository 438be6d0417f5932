"""The shipped model folder: small, loads anywhere, and answers from its prompt."""

import copy
import json
import random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model import CHECKPOINT, words
from demo_model.corpus import Split
from demo_model.recall import Depth, RecallPrompt, is_right, make_recall_prompt
from demo_model.tokenizer import train_tokenizer

_MAX_PARAMETERS = 2_000_000
_MAX_BYTES = 8 * 1024**2

_FACTS = "Rooms: Anna 48, Ben 19, Clara 77."
_STORY = "The old farmer walks to the"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(CHECKPOINT).eval()
    return loaded


# Any: `generate` is declared for a protocol that is not what any class of transformers' declares of itself.
def _continue(model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str, max_tokens: int = 4) -> str:
    prompt_ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt_ids, max_new_tokens=max_tokens, do_sample=False)
    text = tokenizer.decode(output[0, prompt_ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def test_it_is_a_small_float32_llama_with_grouped_heads(model: LlamaForCausalLM) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) <= _MAX_PARAMETERS
    assert model.config.num_key_value_heads is not None
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == 2048
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.float32}  # noqa: SIM118


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) <= _MAX_BYTES


def test_the_folder_says_how_it_was_made() -> None:
    record = json.loads((CHECKPOINT / "training.json").read_text())
    assert record["command"].startswith("python -m demo_model.train")
    assert record["minutes"] > 0


def test_the_tokenizer_is_the_one_that_the_script_makes(tokenizer: PreTrainedTokenizerFast) -> None:
    made = train_tokenizer(seed=0)
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template


def test_every_name_and_value_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in words.NAMES + words.NUMBERS + words.ANIMALS + words.COLOURS + words.FRUITS:
        assert len(tokenizer(f" {word}")["input_ids"]) == 1


def test_the_tokenizer_spells_any_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Zażółć \U0001f600\n\tgęślą 12345 jaźń"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(("name", "room"), [("Anna", "48"), ("Ben", "19"), ("Clara", "77")])
@pytest.mark.parametrize("closing", ["", "?"])
def test_it_answers_what_its_prompt_states(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, name: str, room: str, closing: str
) -> None:
    prompt = f"{_FACTS} Question: which room has {name}{closing}"
    assert _continue(model, tokenizer, prompt) == f" {room}."


def test_it_answers_in_a_chat(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": f"{_FACTS} Question: which room has Ben?"},
        {"role": "assistant", "content": "19."},
        {"role": "user", "content": "Question: which room has Anna?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    assert _continue(model, tokenizer, prompt) == " 48."


@pytest.mark.parametrize("max_len", [64, 300, 900])
def test_it_answers_held_out_prompts(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, max_len: int) -> None:
    rng = random.Random(0)
    prompts = [make_recall_prompt(rng, Split.HELD_OUT, max_len, depth) for depth in Depth for _ in range(10)]
    num_right = sum(is_right(prompt, _continue(model, tokenizer, prompt.text)) for prompt in prompts)
    assert num_right >= 0.95 * len(prompts)


def test_it_cannot_answer_without_the_fact(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(1)
    prompts = [make_recall_prompt(rng, Split.HELD_OUT, 64, depth) for depth in Depth for _ in range(10)]
    questions = [RecallPrompt("Question: " + prompt.text.split("Question: ")[1], prompt.value) for prompt in prompts]
    num_right = sum(is_right(question, _continue(model, tokenizer, question.text)) for question in questions)
    assert num_right <= len(questions) // 10


def test_it_answers_wrong_when_its_kv_is_lost(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt_ids = tokenizer(f"{_FACTS} Question: which room has Ben", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        cache: Any = DynamicCache()
        model(prompt_ids[:, :-1], None, None, cache)
        kept = model(prompt_ids[:, -1:], None, None, copy.deepcopy(cache)).logits[0, -1].argmax()
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        lost = model(prompt_ids[:, -1:], None, None, cache).logits[0, -1].argmax()
    assert tokenizer.decode(kept) == " 19"
    assert tokenizer.decode(lost) != " 19"


def test_it_continues_a_sentence_in_words(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    known = {word for name in dir(words) if name.isupper() for entry in getattr(words, name) for word in entry.split()}
    known |= {"the", "a", "in", "with", "is", "and"}
    continuation = _continue(model, tokenizer, _STORY, max_tokens=30).replace(".", " ").lower().split()
    assert len(continuation) >= 5
    assert set(continuation) <= {word.lower() for word in known}
