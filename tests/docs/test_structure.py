"""Bounds on the code's structure; tests/docs/structure.py prints the figures."""

from tests.docs import structure


def test_small_files_with_one_importer_are_few() -> None:
    assert len(structure.small_files_with_one_importer()) <= 5


def test_no_folder_is_crowded() -> None:
    assert structure.crowded_folders() == {}


def test_tests_ask_public_questions_only() -> None:
    assert list(structure.private_reaches()) == []
