"""The command line: the program ``ckptkit``, and ``python -m ckptkit``.

Python puts the working directory first among the places to import from with ``-m``. A checkpoint's
folder may contain a ``torch.py``, so that is undone; the package itself has been found by now.
"""

import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line. An interrupt while modules are imported ends it without a traceback."""
    try:
        from ckptkit.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _forget_folder() -> None:
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    if sys.path and sys.path[0] in ("", here):
        del sys.path[0]


if __name__ == "__main__":
    _forget_folder()
    main()
