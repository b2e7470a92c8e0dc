"""A field of config.json beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compared:
    """A field of the configuration beside the tensors.

    ``found`` is what the tensors have instead, None where they have what the field says.
    """

    code: str
    field: str
    expected: object
    found: object | None = None

    def __str__(self) -> str:
        return f"{self.field} is {self.expected}, and the tensors have {self.found}"
