"""Inside router, engine and kv_store no import runs back up: what is below a room does not know it."""

from pathlib import Path

import pytest

from tests.docs.figures import LAYERED, ROOT
from tests.docs.import_chains import arrows_back_up, graph_of, longest_chain


@pytest.mark.parametrize("package", LAYERED)
def test_no_import_runs_back_up(package: str) -> None:
    assert arrows_back_up(graph_of(ROOT, package)) == []


def test_an_import_that_runs_back_up_is_found(tmp_path: Path) -> None:
    for name, text in {
        "house/roof/tiles.py": "from house.walls import brick, door\n",
        "house/walls/brick.py": "import house.walls.door\n",
        "house/walls/door.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert arrows_back_up(graph_of(tmp_path, "house")) == []
    chain = ("house.roof.tiles", "house.walls.brick", "house.walls.door")
    assert longest_chain(graph_of(tmp_path, "house")) == chain
    (tmp_path / "house/walls/door.py").write_text("def knock():\n    from house.roof import tiles\n")
    assert arrows_back_up(graph_of(tmp_path, "house")) == ["house.walls.door -> house.roof.tiles"]
