from pathlib import Path

import pytest

from engine.checkpoint.hub import find_folder
from wire.errors import ModelError


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing", "/no/such/folder", "a/b/c", "../up", "owner/model@main"])
def test_a_name_of_neither_path_nor_hub_is_refused_without_a_request(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a name on the hub"):
        find_folder(name)


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/model is no folder here, and the hub cannot be reached"):
        find_folder("owner/model")


def test_hub_is_asked_for_nothing_but_configuration_weights_and_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, allow_patterns: list[str]) -> str:
        assert not [pattern for pattern in allow_patterns if pattern.endswith((".py", ".bin", ".pt", "*"))]
        return f"/cache/{name}"

    monkeypatch.setattr("engine.checkpoint.hub.snapshot_download", snapshot)
    assert find_folder("owner/model") == Path("/cache/owner/model")
