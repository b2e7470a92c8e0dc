"""Differences between versions of torch in what `torch.load(weights_only=True)` accepts.

`ckptkit.trust` has the list of torch 2.13; here is how others differ from it. From 2.15 on an
object of an extension class (pybind11) that the user has allowed must also be given a state
(NEWOBJ, then BUILD), or it is refused: no class of the default list is one, so that no verdict
depends on it. (torch/_weights_only_unpickler.py of 2.13, 2.14.1 and the development branch after
2.14)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptkit.core.tree import Global

# Names with the first version that accepts them, and the first that refuses them again.
SINCE = {("torch", "bcomplex32"): "2.15"}
UNTIL = {("torch._utils", "_rebuild_nested_tensor"): "2.15"}


def differences(names: Iterable[Global]) -> Iterator[str]:
    """A line for each of the names on which versions of torch disagree."""
    for name in names:
        key = name.module, name.name
        if key in SINCE:
            yield f"weights_only of torch before {SINCE[key]} refuses {name}"
        if key in UNTIL:
            yield f"weights_only of torch {UNTIL[key]} and later refuses {name}"
