"""A module of kernels that takes the process down that imports it."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
