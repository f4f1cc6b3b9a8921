"""Train a model: ``python train.py configs/tiny.py --steps 100``; ``--help`` says more."""

import os
import sys

# Before torch starts its threads: a waiting one (GNU OpenMP) spins a little and then sleeps.
# Sleeping at once costs two thirds of the speed of configs/tiny.py on two idle cores; spinning for
# long, more than that on cores that are shared.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from k31fn.trainer import main

if __name__ == "__main__":
    sys.exit(main())
