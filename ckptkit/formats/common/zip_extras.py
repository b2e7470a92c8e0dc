"""What every format in a zip archive can do beyond reading, imported when it is done: most commands only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptkit.formats.format import Part, Probe

if TYPE_CHECKING:
    from ckptkit.pickles.streams import Found


def check(probe: Probe) -> Iterator[Part]:
    """See :mod:`zip_check`."""
    from ckptkit.formats.common import zip_check

    return zip_check.check(probe)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """See :mod:`zip_pickles`."""
    from ckptkit.formats.common import zip_pickles

    return zip_pickles.pickles(probe)
