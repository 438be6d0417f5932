"""The types that programs ask for."""

from typing import Literal

from pydantic import BaseModel


class Look(BaseModel):
    """Looks at a pet."""

    pet: Literal["dog", "cat", "parrot"]
    times: Literal[1, 2, 3]


class Answer(BaseModel):
    """A typed answer."""

    name: Literal["Tom", "Lucy"]
    is_sure: bool
