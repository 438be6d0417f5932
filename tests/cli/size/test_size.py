import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli.__main__ import main
from demo_model import CHECKPOINT
from tests.cli.size.published_models import DEEPSEEK_V3, LLAMA_3_8B, MISTRAL_7B
from tests.engine.gguf.files import make_gguf
from tests.kernels.backends import lend_kernels

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["size", *map(str, arguments), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_object_for_scripts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, model)
    names = "bytes_per_token bytes_per_token_per_layer bytes_per_request weight_bytes max_requests limited_by"
    expected = [131072, 4096, GIB, 2 * 8_030_261_248, 7, "kv"]
    assert [answer[name] for name in names.split()] == expected


def test_flags_change_the_request_and_the_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--context", 32768, "--kv-dtype", "int8", "--window", 4096, "--gpu", "80GiB", "--concurrency", 300)
    answer = told(capsys, model / "config.json", *flags)
    assert answer["bytes_per_token"] == 32 * 2 * 8 * (128 + 2)
    assert answer["bytes_per_request"] == 257 * 16 * answer["bytes_per_token"]
    assert answer["max_requests"] == (80 * GIB - 2 * GIB - answer["weight_bytes"]) // answer["bytes_per_request"] == 247
    assert answer["fits"] is False


def test_the_screen_shows_the_request_the_gpu_and_each_technique(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", str(model), "--concurrency", "32"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "Llama-3-8B: 8.03 billion parameters in bfloat16, context of 8,192 tokens",
        "32 layers, 32 query heads sharing 8 KV heads of 128",
        "KV of a token 128 KiB its keys and values: 4 KiB in each of 32 layers",
        "KV of a request 1 GiB 8,192 tokens: 512 blocks of 16 tokens",
        "A GPU of 24 GiB has 7.042 GiB left for KV: room for 7 such requests at once.",
        "32 at once take 48.96 GiB in all, which does not fit.",
        "16 GiB 0 B 0 weights and reserve",
        "KV in int8 65 KiB 520 MiB 13 yes",
        "KV in int4 36.5 KiB 292 MiB 24 yes",
    ):
        assert line in shown


def test_sinks_are_counted_beside_their_window(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["size", str(model), "--context", "100000", "--kv-policy", "sinks=4+1020"]
    assert main(flags) == 0
    assert "100,000 tokens, of which the first 4 and the last 1,020 are kept: 66 blocks" in capsys.readouterr().out


def test_a_budget_is_counted_in_whole_blocks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(model), "--context", "1000", "--kv-policy", "snapkv=25%"]) == 0
    assert "1,000 tokens of prompt, of which snapkv=25% keeps a part: 17 blocks" in capsys.readouterr().out


def test_a_latent_vector_and_a_window_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["size", str(tmp_path), "--window", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "671 billion parameters in 8 bits" in shown
    assert "128 heads sharing a latent vector of 576" in shown
    assert "163,840 tokens, of which the last 1,024 are kept: 65 blocks" in shown
    assert "A GPU of 24 GiB cannot hold the weights." in shown


def test_a_window_wider_than_the_context_changes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for flags in ([], ["--window", "8192"], ["--window", "9000"]):
        assert main(["size", str(model), *flags]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    narrower = told(capsys, model, "--window", 8191)
    assert narrower["bytes_per_request"] == GIB  # it begins and ends amid a block
    assert "first half of all prompts the same" not in narrower["techniques"]


def test_a_gpu_in_units_of_its_maker(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, model, "--gpu", "80GB")
    assert answer["gpu_bytes"] == 80 * 10**9
    assert answer["max_requests"] == (80 * 10**9 - 2 * GIB - 2 * 8_030_261_248) // GIB == 57


def test_a_file_is_known_by_its_content(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lend_kernels(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_gguf(tmp_path, "Q4_0")
    expected = told(capsys, path)
    path.rename(tmp_path / "blob")
    (tmp_path / "link").symlink_to("blob")
    assert told(capsys, tmp_path / "link") == expected
    (model / "config.json").rename(tmp_path / "config.gguf")
    assert told(capsys, tmp_path / "config.gguf")["weight_bytes"] == 2 * 8_030_261_248


def test_the_folder_of_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, CHECKPOINT.parent)
    assert answer == told(capsys, CHECKPOINT)
    assert answer["bytes_per_token"] == 4 * 2 * 2 * 32 * 4
    tensors = load_file(CHECKPOINT / "model.safetensors").values()
    assert answer["weight_bytes"] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no-such-model"], 78, "no-such-model is neither a folder, a GGUF file nor a config.json"),
        (["{model}", "--context", "0"], 2, "argument --context: must be at least 1, not 0"),
        (["{model}", "--concurrency", "x"], 2, "argument --concurrency: must be a whole number"),
        (["{model}", "--gpu", "24gb"], 78, "--gpu must be a size like 512MiB"),
        (["{model}", "--kv-dtype", "int2"], 2, "argument --kv-dtype: invalid choice"),
        ([], 2, "the following arguments are required: MODEL"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], code: int, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *(one.format(model=model) for one in arguments)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not valid JSON"),
        (json.dumps(MISTRAL_7B | {"num_key_value_heads": 7}), "config.json: num_key_value_heads is 7"),
    ],
)
def test_a_config_that_lies_is_refused_in_one_line(
    content: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(content)
    assert main(["size", str(model)]) == 78
    assert message in capsys.readouterr().err


def test_a_folder_without_a_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(tmp_path)]) == 78
    assert "config.json is missing" in capsys.readouterr().err
