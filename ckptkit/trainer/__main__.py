"""``python -m ckptkit.trainer`` is ``ckptkit train``: the form that ``torchrun -m`` can start."""

import sys

from ckptkit.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
