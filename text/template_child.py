"""A process that renders a model's chat template, with transformers' own renderer: `python -m text.template_child`.

in   {"template", "memory_bytes"}, then any number of {"messages", "tools", "variables", "max_chars"}
out  {}, then for each of these {"text"} or {"failure"}

Each message is JSON behind its length in four bytes. Templates come from model folders and are programs: their memory
and the processor time of each rendering are limited here; the wait for one is limited by the process that asks.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

MAX_CPU_S = 1.0
MAX_FAILURE_CHARS = 100
LENGTH = struct.Struct("<I")


def main() -> None:
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    given = read_message(sys.stdin.buffer)
    if given is None:
        return
    render = _import_renderer()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + given["memory_bytes"],) * 2)
    write_message(out, {})
    while (asked := read_message(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF ends a process
        answer = _answer(partial(render, chat_template=given["template"]), asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(out, answer)


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


def read_message(stream: IO[bytes]) -> dict[str, Any] | None:
    """Blocks for a message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    data = stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    return json.loads(data) if data else None


def write_message(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Blocks until the stream has taken it. Raises OSError."""
    data = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main()
