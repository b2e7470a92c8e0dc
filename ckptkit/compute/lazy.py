"""Import numpy when a function first uses it. Many commands never use numpy."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

__all__ = ["Array", "import_numpy", "np"]

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@cache
def import_numpy() -> None:
    """Import numpy. In a command, disable the threads of numpy's linear algebra library.

    Otherwise, the threads of the library would busy-wait at first, and take processor time from the
    threads of ckptkit. If another program imports ckptkit, do not disable the threads of the
    library, because the program may need these threads.
    """
    is_command = "ckptkit.cli" in sys.modules and "numpy" not in sys.modules
    if is_command and _BLAS_THREADS not in os.environ:
        os.environ[_BLAS_THREADS] = "1"  # read when numpy loads the library
        try:
            import numpy  # noqa: F401
        finally:
            del os.environ[_BLAS_THREADS]


class _Numpy:
    """Imports numpy when a name of numpy is first used. Later uses are as fast as in a module."""

    def __getattr__(self, name: str) -> Any:
        import_numpy()
        import numpy

        found = getattr(numpy, name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
else:
    np = _Numpy()
    Array = Any
