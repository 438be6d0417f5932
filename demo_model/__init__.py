"""A small Llama model that answers questions about facts in its prompt, and the script that made it."""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""The model folder that ships with the project."""

DRAFT: Path = Path(__file__).parent / "draft"
"""The folder of its draft, which guesses what it says next."""
