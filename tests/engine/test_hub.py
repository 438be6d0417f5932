import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.hub import find_folder
from tests.engine.hub_server import Finder, HubServer, serving
from tests.harness.checkpoints import shard
from text.template.template_processes import Template
from wire.errors import ModelError


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing", "/no/such/folder", "a/b/c", "../up", "owner/model@main"])
def test_a_name_of_neither_path_nor_hub_is_refused_without_a_request(name: str) -> None:
    with pytest.raises(ModelError, match="no folder, GGUF file, name of `baton pull` or name on the hub"):
        find_folder(name)


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/model is no folder here, and the hub cannot be reached"):
        find_folder("owner/model")


MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00005.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
OTHER_FILES = ("modeling_own.py", "pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf", "x.pt")


@pytest.fixture(scope="module")
def finder() -> Iterator[Finder]:
    with closing(Finder()) as finder:
        yield finder


@pytest.fixture
def hub(checkpoint: Callable[[str], Path], tmp_path: Path, finder: Finder) -> Iterator[HubServer]:
    """A hub whose model has weights in several files, a chat template of its own, and files that nothing reads."""
    folder = shard(checkpoint("llama-gqa"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w250", "chat_template": "an older one"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in OTHER_FILES:
        (folder / name).write_text("never read")
    with serving(folder, tmp_path / "home", finder) as hub:
        yield hub


def test_everything_that_a_model_is_loaded_from_comes_from_the_hub_and_nothing_else(hub: HubServer) -> None:
    found = Path(hub.find())
    assert {path.name for path in found.iterdir()} >= MODEL_FILES
    assert {path.name for path in found.iterdir()}.isdisjoint(OTHER_FILES)
    assert not [path for path in hub.paths if path.endswith(OTHER_FILES)]
    ours, theirs = Checkpoint(hub.folder), Checkpoint(found)
    assert theirs.config == ours.config
    assert theirs.config.eos_token_ids == (7, 9)
    assert [path.read_bytes() for path in theirs.files] == [path.read_bytes() for path in ours.files]
    own = Template(source="{{ messages[0].content }}", variables={"eos_token": "w250"})
    assert Template.load(found) == Template.load(hub.folder) == own


def test_a_model_that_was_fetched_once_is_found_while_the_hub_is_away(hub: HubServer) -> None:
    found = hub.find()
    hub.refusals["/"] = (503, "")
    assert hub.find() == found
    hub.shutdown()
    hub.server_close()
    assert hub.find() == found
    assert hub.find(HF_HUB_OFFLINE="1") == found


@pytest.mark.parametrize(
    ("path", "status", "code", "reason"),
    [
        ("/api", 401, "RepoNotFound", "owner/model is no folder here, and the hub knows no such model"),
        ("/api", 404, "RepoNotFound", "owner/model is no folder here, and the hub knows no such model"),
        ("/api", 403, "GatedRepo", "owner/model is gated on the hub: ask for access, then set HF_TOKEN"),
        ("/owner", 403, "GatedRepo", "owner/model is gated on the hub: ask for access, then set HF_TOKEN"),
        ("/owner", 401, "GatedRepo", "owner/model is gated on the hub: ask for access, then set HF_TOKEN"),
        ("/api", 503, "", "owner/model is no folder here, and the hub cannot be reached"),
    ],
)
def test_a_hub_that_refuses_is_said_so(hub: HubServer, path: str, status: int, code: str, reason: str) -> None:
    hub.refusals[path] = (status, code)
    assert hub.find() == f"refused: {reason}"
    hub.refusals.clear()
    assert Checkpoint(Path(hub.find())).config == Checkpoint(hub.folder).config


def test_an_access_token_goes_to_the_hub(hub: HubServer) -> None:
    hub.find(HF_TOKEN="hf_abc")
    assert "Bearer hf_abc" in hub.tokens


def test_a_download_that_is_cut_short_is_refused_and_no_model(hub: HubServer) -> None:
    hub.max_bytes = 5000
    assert hub.find().startswith("refused: owner/model could not be fetched from the hub: ")
    hub.max_bytes = sys.maxsize
    assert Checkpoint(Path(hub.find())).config == Checkpoint(hub.folder).config
