"""Train a model: ``python train.py configs/tiny.py --steps 100``; ``--help`` says more."""

import os
import sys

# Before torch starts its threads: waiting ones sleep. Spinning ones make a shared machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from k31fn.trainer import main

if __name__ == "__main__":
    sys.exit(main())
