"""The ranks of a run: how they start, agree, are watched, and end.

- :mod:`~k31fn.trainer.ranks.launch`: the processes that ``torchrun`` starts join as ranks.
- :mod:`~k31fn.trainer.ranks.agreement`: what one rank decides or fails with, all learn.
- :mod:`~k31fn.trainer.ranks.stop`: signals and the time limit end a run after a whole step.
- :mod:`~k31fn.trainer.ranks.watchdog`: a thread that finds a rank that died or hangs.
- :mod:`~k31fn.trainer.ranks.failure_report`: what each rank was doing when a run was lost.
"""
