"""The same prompts as transformers' apply_chat_template, and a sandbox around the template."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.text.backends import byte_level, write_folder
from text import chat_template
from text.chat_template import ChatTemplate
from wire.errors import InvalidRequest, ModelError

CHATML = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ bos_token }}{{ messages | tojson }}<|im_start|>assistant
{% endif %}
"""
MESSAGES = [{"role": "system", "content": " <b> & €\0 "}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_same_as_transformers(tmp_path: Path, file: str) -> None:
    in_config = {"chat_template": CHATML} if file == "tokenizer_config.json" else {}
    folder = write_folder(tmp_path, byte_level(), bos_token="<s>", **in_config)
    if not in_config:
        (folder / file).write_text(CHATML)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.load(folder)
    assert ours is not None
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.render(MESSAGES) == expected


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(write_folder(tmp_path, byte_level())) is None


def test_a_malformed_template_is_refused() -> None:
    with pytest.raises(ModelError):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('secret') }}",
        "{{ messages[7].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_what_a_template_may_not_or_cannot_do(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: the model's chat template does not take them$"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_prompt_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 1000)
    endless = ChatTemplate("{% for i in range(90000) %}{% for j in range(90000) %}{{ i }}{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="exceed 1000 characters"):
        endless.render([])
