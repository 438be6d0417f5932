"""A process that renders a model's chat template, with transformers' own renderer: `python -m text.template_child`.

in   {"template", "memory_bytes"}, then any number of {"messages", "tools", "variables", "max_chars"}
out  {}, then for each of these {"text"} or {"failure"}

Messages are JSON on a `multiprocessing.Connection`, which is stdin. Templates come from model folders and are programs:
their memory and the processor time of each rendering are limited here; the process that asks limits its wait.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MAX_CPU_S = 1.0
MAX_FAILURE_CHARS = 100


def main() -> None:
    with suppress(EOFError):
        _serve(Connection(os.dup(0)))


def _serve(line: Connection) -> None:
    """Renders until the other side hangs up, which raises EOFError."""
    given = json.loads(line.recv_bytes())
    render = _import_renderer()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + given["memory_bytes"],) * 2)
    line.send_bytes(b"{}")
    while True:
        asked = json.loads(line.recv_bytes())
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends a process
        answer = _answer(partial(render, chat_template=given["template"]), asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        line.send_bytes(json.dumps(answer).encode())


def _import_renderer() -> Any:
    """Imports the renderer without torch, which would take a second and 200 MB."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _answer(render: Any, asked: dict[str, Any]) -> dict[str, str]:
    from jinja2.exceptions import TemplateError

    try:
        tools = asked["tools"] or None
        [text], _ = render([asked["messages"]], tools=tools, add_generation_prompt=True, **asked["variables"])
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
    main()
