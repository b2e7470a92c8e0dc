"""The libraries that people train with save a small model, ckptkit works on the file, and they load
what it wrote.

Each file of tests needs its library and skips without it: ``pip install -c tests/constraints.txt -e
'.[interop]'``. Nothing is downloaded; all weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.conftest import Run

Ckptkit = Callable[..., str]


def pytest_configure(config: pytest.Config) -> None:
    _declare_operators_of_torchvision()


def _declare_operators_of_torchvision() -> None:
    """A torchvision that was compiled for another build of torch has no operators, and cannot be
    imported: it looks for two of them. No model that is used here calls one."""
    from importlib.util import find_spec

    if find_spec("torchvision") is None:
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            return  # declared by torchvision itself
    _KEPT.append(library)


_KEPT: list[Any] = []  # a Library takes back what it declared when it is collected


@pytest.fixture
def ckptkit(run: Run) -> Ckptkit:
    """``ckptkit("convert", a, b)``: what it prints; the command must succeed."""

    def command(*args: object, code: int = 0) -> str:
        done = run(*args)
        assert done.code == code, done.stdout + done.stderr
        return done.stdout

    return command


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same names with the same bytes."""
    import torch

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
