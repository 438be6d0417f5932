"""Programs that people build agents with: how each is pointed at a gateway, and run without a terminal."""

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MODEL = "speaking"
QUESTION = "say hello"
TIMEOUT_S = 120
NOTE = "the kettle is blue"
"""What is in note.txt of the folder in which programs run."""
CODEX = f"""\
model = "{MODEL}"
model_provider = "baton"
check_for_update_on_startup = false
[model_providers.baton]
name = "Baton"
base_url = "<url>/v1"
wire_api = "responses"
env_key = "BATON_KEY"
[analytics]
enabled = false
"""
OPENCODE = f"""\
{{
  "model": "baton/{MODEL}", "small_model": "baton/{MODEL}", "enabled_providers": ["baton"],
  "autoupdate": false, "share": "disabled",
  "provider": {{"baton": {{
    "npm": "<package>", "name": "Baton", "options": {{"baseURL": "<url>/v1", "apiKey": "none"}},
    "models": {{"{MODEL}": {{"name": "{MODEL}", "limit": {{"context": 131072, "output": 4096}}}}}}
  }}}}
}}
"""
QWEN_CODE = '{"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}'
CLINE = '{"telemetryOptOut": true, "autoUpdateEnabled": false}'
PRICES = '{"openai/none": {}}'


@dataclass(frozen=True)
class Program:
    """A command with its environment, and files of its home; in all of them <url> stands for the gateway's address.

    before: a command that configures it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How a program ended, and the processes that it left, which are killed."""

    status: int
    output: str
    errors: str
    left: list[str]


def claude_code(question: str = QUESTION, *flags: str, **more: str) -> Program:
    environment = {
        "ANTHROPIC_BASE_URL": "<url>",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **more,
    }
    return Program(("claude", "-p", question, *flags), environment)


def codex(question: str = QUESTION, *flags: str) -> Program:
    command = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *flags, question)
    return Program(command, {"BATON_KEY": "none"}, {".codex/config.toml": CODEX})


def opencode(package: str) -> Program:
    environment = {
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    return Program(
        ("opencode", "run", QUESTION),
        environment,
        {".config/opencode/opencode.json": OPENCODE.replace("<package>", package)},
    )


def qwen_code(dialect: str) -> Program:
    environment = {
        "openai": {"OPENAI_BASE_URL": "<url>/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        "anthropic": {"ANTHROPIC_BASE_URL": "<url>", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL},
    }[dialect]
    environment["HTTPS_PROXY"] = ""  # it sends everything there, NO_PROXY or not
    return Program(("qwen", "--auth-type", dialect, "-p", QUESTION), environment, {".qwen/settings.json": QWEN_CODE})


def cline(*flags: str) -> Program:
    """Cline without its background hub, which outlives it."""
    return Program(
        ("cline", "--provider", "openai", "--model", MODEL, *flags, QUESTION),
        {"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_NO_AUTO_UPDATE": "1"},
        {".cline/data/settings/global-settings.json": CLINE},
        before=(
            "cline",
            "auth",
            "--provider",
            "openai",
            "--apikey",
            "none",
            "--modelid",
            MODEL,
            "--baseurl",
            "<url>/v1",
        ),
    )


def aider() -> Program:
    flags = ("--yes-always", "--no-git", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings")
    quiet = ("--analytics-disable", "--no-pretty", "--no-detect-urls")
    return Program(
        ("aider", "--model", f"openai/{MODEL}", *flags, *quiet, "--message", QUESTION),
        {"OPENAI_API_BASE": "<url>/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {".aider/caches/model_prices_and_context_window.json": PRICES},
    )


def run(program: Program, url: str, folder: Path, timeout_s: float = TIMEOUT_S) -> Ended:
    """Runs a program in `folder`/project, its home beside it, until it ends or its time is over.

    What it asks of other machines over HTTPS goes to `url`, where it is refused.
    """
    home, project = folder / "home", folder / "project"
    project.mkdir(exist_ok=True)
    (project / "note.txt").write_text(f"{NOTE}\n")

    def filled(text: str) -> str:
        return text.replace("<url>", url)

    for name, text in program.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(filled(text))
    venv = Path(os.environ["BATON_CLIENTS_VENV"])
    environment = {
        "PATH": f"{venv}/programs/node_modules/.bin:{venv}/aider/bin:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "HTTPS_PROXY": url,
        "NO_PROXY": "127.0.0.1,localhost",
        **{name: filled(value) for name, value in program.environment.items()},
    }
    try:
        for command in filter(None, (program.before, program.command)):
            status, output, errors = run_alone([filled(part) for part in command], environment, project, timeout_s)
            if status:
                break
    finally:
        left = end_processes_of(home)
    return Ended(status, output, errors, left)


def run_alone(command: list[str], environment: dict[str, str], folder: Path, timeout_s: float) -> tuple[int, str, str]:
    """Runs a command in a group of processes of its own, which is killed at the end, at the latest after timeout_s."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += f"\nkilled after {timeout_s} s"
    return process.returncode, output, errors


def end_processes_of(home: Path) -> list[str]:
    """Kills the processes whose home this folder is; returns their commands."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                found.append(" ".join(process.cmdline()))
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
