"""The product does not grow unsaid."""

from tests.docs import sizes


def test_no_package_is_larger_than_its_bound() -> None:
    """A capability raises its rows of sizes.toml in its own commit."""
    found, allowed = sizes.sizes(), sizes.bounds()
    assert found.keys() == allowed.keys()
    assert {name: count - allowed[name] for name, count in found.items() if count > allowed[name]} == {}


def test_statements_are_counted_at_any_depth_without_docstrings() -> None:
    source = '"""Doc."""\nimport os\n\n\ndef f(x):\n    """Doc."""\n    if x:\n        return 1\n    return 2\n'
    assert sizes.num_statements(source) == 5
