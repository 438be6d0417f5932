"""Dataclasses of more than five fields are made by keyword: of two values of one type, none takes the other's place."""

import ast
from collections.abc import Iterable

import baton
from tests.docs.sizes import ROOT, product_packages

MOST = 5


def fields_of(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """Returns the fields of a dataclass that its constructor takes, the ones of its bases too."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    found = {
        name
        for base in bases
        if isinstance(base, ast.Name) and base.id in known
        for name in fields_of(known[base.id], known)
    }
    declared = [one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.dump(one)]
    taken = [one for one in declared if one.value is None or "init=False" not in ast.unparse(one.value)]
    return found | {one.target.id for one in taken if isinstance(one.target, ast.Name)}


def made_by_place(sources: Iterable[str]) -> set[str]:
    """Names the dataclasses of more than MOST fields that are not keyword-only; not a base of an Enum, as `Row` is."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    decorators = {node.name: [ast.unparse(one) for one in node.decorator_list] for node in nodes}
    known = {node.name: node for node in nodes if any(one.startswith("dataclass") for one in decorators[node.name])}
    wide = {name for name, node in known.items() if len(fields_of(node, known)) > MOST}
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in nodes}
    rows = {base for names in bases.values() if "Enum" in names for base in names}
    return {name for name in wide - rows if not any("kw_only=True" in one for one in decorators[name])}


def test_a_wide_dataclass_is_found() -> None:
    six = "".join(f"    f{number}: int\n" for number in range(6))
    five = six.replace("    f5: int\n", "")
    told = made_by_place(
        [
            f"@dataclass(frozen=True)\nclass Six:\n{six}",
            f"@dataclass\nclass Five:\n{five}    own: int = field(init=False)\n",
            "@dataclass\nclass More(Five):\n    another: int\n",
            f"@dataclass(kw_only=True)\nclass Named:\n{six}",
            f"class Plain:\n{six}",
            f"@dataclass\nclass Row:\n{six}\nclass Kind(Row, Enum):\n    ONE = (1, 2, 3, 4, 5, 6)\n",
        ]
    )
    assert told == {"Six", "More"}


def test_dataclasses_of_more_than_five_fields_are_made_by_keyword() -> None:
    """But for what the public face exports, which programs of users make."""
    files = [file for package in product_packages() for file in (ROOT / package).rglob("*.py")]
    told = made_by_place(file.read_text() for file in files if file.parent.name != "pb")
    assert told - {*baton.__all__} == set()
