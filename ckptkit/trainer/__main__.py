"""Run the trainer as a module: ``torchrun -m ckptkit.trainer OUT``.

The same as ``ckptkit train``.
"""

from ckptkit.trainer.command import main

if __name__ == "__main__":
    main()
