"""Run the command line: the program ``ckptkit``, and ``python -m ckptkit``.

With ``-m``, Python puts the working directory first into sys.path. ckptkit would then import a
hostile ``torch.py`` from the working directory. Therefore, this module removes the working
directory from sys.path.
"""

import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line. If the user interrupts the imports, exit without a traceback."""
    try:
        from ckptkit.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _forget_folder() -> None:
    try:
        here = os.getcwd()
    except OSError:  # the working directory no longer exists
        here = ""
    if sys.path and sys.path[0] in ("", here):
        del sys.path[0]


if __name__ == "__main__":
    _forget_folder()
    main()
