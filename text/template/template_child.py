"""A process that renders a chat template with transformers' own renderer: `python -m text.template.template_child`.

first   {"template", "memory_bytes"}
task    {"messages", "tools", "variables", "continues", "opens", "max_chars"}, answered by {"text"} or {"failure"};
        opens: whether the assistant's next turn begins

Templates come from model folders and are untrusted programs.
"""

import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec, module_from_spec
from typing import Any

from text.child import Handler, serve

MAX_FAILURE_CHARS = 100
PACKAGES = ("transformers", "transformers.utils")
"""The renderer's packages, whose own modules list all models, for 0.5 s of a processor."""


def _prepare(first: dict[str, Any]) -> Handler:
    return partial(_answer, partial(_import_renderer(), chat_template=first["template"]))


def _import_renderer() -> Any:
    """Imports the renderer without torch, which would take a second and 200 MB, and without its packages' own modules.

    A release of transformers whose renderer needs these has them imported, too.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    for package in PACKAGES:
        if (spec := find_spec(package)) is not None:
            sys.modules[package] = module_from_spec(spec)
    with suppress(ImportError, AttributeError):
        return _find_renderer()
    for package in PACKAGES:
        sys.modules.pop(package, None)
    return _find_renderer()


def _find_renderer() -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _answer(render: Any, asked: dict[str, Any]) -> dict[str, str]:
    from jinja2.exceptions import TemplateError

    try:
        ends = {"continue_final_message": asked["continues"], "add_generation_prompt": asked["opens"]}
        [text], _ = render([asked["messages"]], tools=asked["tools"] or None, **ends, **asked["variables"])
    except MemoryError:
        return {"failure": "the model's chat template takes too much memory for them"}
    except TemplateError as error:  # the template's own words, as a rule
        said = "".join(char for char in str(error) if char.isprintable())[:MAX_FAILURE_CHARS]
        return {"failure": f"the model's chat template does not take them: {said}"}
    except Exception:
        return {"failure": "the model's chat template does not take them"}
    if len(text) > asked["max_chars"]:
        return {"failure": f"the model's chat template makes more than {asked['max_chars']} characters of them"}
    return {"text": text}


if __name__ == "__main__":
    serve(_prepare)
