"""Import numpy when a function first uses it. Many commands never use numpy."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["Array", "np"]

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class _Numpy:
    """Imports numpy when a name of numpy is first used. Later uses are as fast as in a module.

    In a command, disable the threads of numpy's linear algebra library. Otherwise, these threads
    would busy-wait at first, and take processor time from the threads of ckptkit. If another
    program imports ckptkit, do not disable these threads, because the program may need them.
    """

    def __getattr__(self, name: str) -> Any:
        is_command = "ckptkit.cli" in sys.modules and "numpy" not in sys.modules
        is_changed = is_command and _BLAS_THREADS not in os.environ
        if is_changed:
            os.environ[_BLAS_THREADS] = "1"  # read when numpy loads the library
        try:
            import numpy
        finally:
            if is_changed:
                os.environ.pop(_BLAS_THREADS, None)
        found = getattr(numpy, name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
else:
    np = _Numpy()
    Array = Any
