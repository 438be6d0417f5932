"""The demo model's tokenizer: a byte-level BPE, trained on the generated language."""

import random
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo_model import words
from demo_model.corpus import Split
from demo_model.documents import make_document
from demo_model.prompts import ASSISTANT, END, USER

_VOCAB_SIZE = 1408
_NUM_DOCUMENTS = 3000
_DOCUMENT_LEN = 128

# A chat is the completion text with a mark before each turn; an answer starts with a space, as in running text.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    f"{ASSISTANT}{{{{ ' ' + message['content'] | trim }}}}{END}"
    "{%- else -%}"
    f"{USER}{{{{ message['content'] | trim }}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    f"{ASSISTANT}"
    "{%- endif -%}"
)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer that has every word of the generated language as one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(random.Random(seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _training_texts(rng: random.Random) -> Iterator[str]:
    """Yields documents, and as many values and names, which are too rare in documents to become tokens."""
    answers = words.NAMES + words.NUMBERS + words.COLOURS + words.ANIMALS + words.FRUITS
    for _ in range(_NUM_DOCUMENTS):
        yield "".join(piece.text for piece in make_document(rng, Split.TRAIN, _DOCUMENT_LEN))
        yield "".join(f" {answer}" for answer in rng.sample(answers, 40))
