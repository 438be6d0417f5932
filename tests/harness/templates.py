"""Chat templates as families of models have them, in the parts that decide about roles and their order."""

STRICT = (
    "{{- bos_token }}"
    "{%- for tool in tools or [] %}{{- '[tool]' + (tool | tojson) }}{%- endfor %}"
    "{%- set last = namespace(role='') %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}"
    "{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{{- '[system]' + message.content | trim }}"
    "{%- elif message.role in ('user', 'assistant') %}"
    "{%- if last.role == message.role %}{{- raise_exception('Roles must alternate.') }}{%- endif %}"
    "{%- set last.role = message.role %}"
    "{{- '[' + message.role + ']' + (message.content or '') | trim }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}"
    "{{- '</tool_call>' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}{{- '[result]' + message.content }}{%- set last.role = 'tool' %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"
)
"""Qwen 3.5's and Mistral's kind: system first, roles in turn; it passes over roles that it does not know."""
LENIENT = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""SmolLM2's kind: each role, anywhere."""
FIRST_ALONE = (
    "{% if messages[0].role in ('system', 'developer') %}[{{ messages[0].role }}]{{ messages[0].content }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role in ('user', 'assistant') %}[{{ message.role }}]{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""gpt-oss's kind: the first message alone may instruct; later ones it passes over."""
BY_PARITY = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}"
    "{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Mistral Small's kind: a late system message is taken in an assistant's place, and refused elsewhere."""
NO_SYSTEM = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if message.role in ('user', 'assistant') %}[{{ message.role }}]{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Gemma 2's kind."""
SILENT = NO_SYSTEM.replace("{{ raise_exception('System role not supported') }}", "")
"""A template that passes over all instructions."""
