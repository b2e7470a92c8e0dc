"""Run the command line: the program ``ckptkit``, and ``python -m ckptkit``.

With ``-m``, Python puts the working directory first into sys.path. The folder of a checkpoint may
contain a ``torch.py``, so this module removes it. At that point, Python has already found the
package itself.
"""

import os
import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line. An interrupt during imports exits without a traceback."""
    try:
        from ckptkit.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _forget_folder() -> None:
    try:
        here = os.getcwd()
    except OSError:  # the folder was removed
        here = ""
    if sys.path and sys.path[0] in ("", here):
        del sys.path[0]


if __name__ == "__main__":
    _forget_folder()
    main()
