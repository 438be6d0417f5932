"""The tokens that end an answer: all that files name, else the one of the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from tests.harness.checkpoints import make_checkpoint
from tests.text.backends import byte_level, write_folder
from text.template import template_processes
from text.tokenizer import Tokenizer
from wire.errors import ModelError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|end|>")
TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("ends") / "plain", vocab_size=400)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer has <s>, </s> and SPECIAL, and none of whose files names an end token."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((plain / name).read_bytes())
    backend = byte_level()
    backend.add_special_tokens([*SPECIAL])
    write_folder(tmp_path, backend)
    change(tmp_path, "config.json", eos_token_id=None)
    return tmp_path


def change(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    given = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps(given | fields))


def ends(folder: Path) -> set[str]:
    """The ends of answers as texts, each of them once."""
    token_ids = Checkpoint(folder).config.eos_token_ids
    assert len(set(token_ids)) == len(token_ids)
    vocabulary = {token_id: token for token, token_id in Tokenizer.load(folder).vocabulary.items()}
    return {vocabulary[one] for one in token_ids}


def no_process(*_: object) -> str:
    raise AssertionError("a template was rendered")


@pytest.mark.parametrize("end", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_all_files_name_ends(folder: Path, end: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.checkpoint.checkpoint.render_end", no_process)
    ids = Tokenizer.load(folder).vocabulary
    change(folder, "tokenizer_config.json", eos_token=end, chat_template="{{ bos_token }}")
    assert ends(folder) == {"<|im_end|>"}
    change(folder, "config.json", eos_token_id=ids["</s>"])
    assert ends(folder) == {"<|im_end|>", "</s>"}
    change(folder, "generation_config.json", eos_token_id=[ids["<|end|>"], ids["</s>"]])
    assert ends(folder) == {"<|im_end|>", "</s>", "<|end|>"}


def test_a_default_of_the_architecture_is_no_name(folder: Path) -> None:
    """Id 2 is that of a letter here."""
    config = json.loads((folder / "config.json").read_bytes())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint(folder).config.eos_token_ids == (2,)
    change(folder, "tokenizer_config.json", eos_token="</s>")
    assert ends(folder) == {"</s>"}


def test_where_no_file_names_an_end_the_template_shows_it(folder: Path) -> None:
    assert ends(folder) == set()
    (folder / "chat_template.jinja").write_text(TURNS)
    assert ends(folder) == {"<|im_end|>"}


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
        TURNS.replace("<|im_end|>", ""),
        TURNS.replace("<|im_end|>", "<|im_end|><|end|>"),
        "{% for message in messages %}{{ message.role }}<|im_end|>{% endfor %}",
        "{{ raise_exception('only one turn') }}",
        "{% for number in range(10 ** 12) %}{% endfor %}",
        "{% broken",
    ],
)
def test_a_template_without_a_single_end_shows_none(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert ends(folder) == set()


@pytest.mark.parametrize("added", ["none", [1], [{"id": 3}], [{"id": "x", "content": "</s>"}], {"id": 3}])
def test_added_tokens_that_are_none_are_refused(folder: Path, added: object) -> None:
    change(folder, "tokenizer_config.json", eos_token="</s>")
    change(folder, "tokenizer.json", added_tokens=added)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Checkpoint(folder)


def test_a_vocabulary_that_spells_the_field_of_added_tokens_hides_none(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    spelled = {"added_tokens": 1000, '"added_tokens": [': 1001}
    first = {"model": tokenizer["model"] | {"vocab": spelled | tokenizer["model"]["vocab"]}}
    path.write_text(json.dumps(first | {name: value for name, value in tokenizer.items() if name != "model"}))
    change(folder, "tokenizer_config.json", eos_token="</s>")
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    assert Checkpoint(folder).config.eos_token_ids == (ids["</s>"],)


def test_without_a_process_for_the_template_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chat_template.jinja").write_text(TURNS)
    monkeypatch.setattr(template_processes, "MEMORY_BYTES", "none")
    assert ends(folder) == set()
