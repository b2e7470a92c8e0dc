"""Run ``ckptkit train`` as a module, e.g. under torchrun: ``torchrun -m ckptkit.trainer``."""

from ckptkit.trainer.command import main

if __name__ == "__main__":
    main()
