"""The imports of a renderer's process, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAT = [{"role": "user", "content": "fox"}]
RENDER = f"""
import sys
from text.template.template_child import _import_renderer
render = _import_renderer()
[said], _ = render([{CHAT}], chat_template="<{{{{ messages[0].content }}}}>")
print(said, "transformers.utils.hub" in sys.modules)
"""
OTHER_RELEASE = {
    "transformers/__init__.py": "__version__ = '99'\nBRACKETS = '[{}]'\n",
    "transformers/utils/__init__.py": "",
    "transformers/utils/chat_template_utils.py": (
        "from .. import BRACKETS\n"
        "def render_jinja_template(chats, chat_template):\n"
        "    return [BRACKETS.format(chats[0][0]['content'])], None\n"
    ),
}
"""Files of a release whose renderer needs what its package's own module has."""


@pytest.mark.parametrize(("files", "said"), [({}, "<fox> False"), (OTHER_RELEASE, "[fox] False")])
def test_a_renderer_has_the_modules_that_it_needs(files: dict[str, str], said: str, tmp_path: Path) -> None:
    """And no others, which take twice as long, unless a release cannot do without."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", RENDER], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == said, done.stderr
