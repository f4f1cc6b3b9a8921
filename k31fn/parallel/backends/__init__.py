"""The ways in which ranks exist; collectives mean the same in each.

| module | a rank is | what runs in it |
|---|---|---|
| :mod:`~k31fn.parallel.backends.simulated` | a sample of nested ``vmap`` | pure functions |
| :mod:`~k31fn.parallel.backends.threads` | a thread of this process | any Python |
| :mod:`~k31fn.parallel.backends.processes` | a process (gloo, NCCL, HCCL) | any Python |
| :mod:`~k31fn.parallel.backends.abstract` | one of a mesh that does not exist | shapes, on meta |

Each binds axes to a :class:`~k31fn.parallel.axis.Host`; :mod:`~k31fn.parallel.primitive` asks it.
"""
