"""Entry point of ``python -m ckptkit``.

Python has put the working directory first among the places to import from: a checkpoint's folder
may hold a ``torch.py``, so that is undone (the package itself has been found by now).
"""

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from ckptkit.cli import main

if __name__ == "__main__":
    main()
