"""Meshes of several GPUs against one of them: ``torchrun --nproc_per_node=2 -m benchmarks.meshes
--out meshes.json``.

Every process also computes on its own GPU what one GPU computes alone, and compares its parts with
that. Two models: ``tiny`` (configs/tiny.py), and ``wide``: two layers at the widths of Kimi K3.1
Pro, one of KDA and one of Gated DSA, both with experts.

* ``equality``: loss and all gradients of a step. In bfloat16 also those of the same mesh as threads
  on one GPU: one GPU that sums in the order of the mesh, whose distance from the plain order is
  what rounding alone does.
* ``training``: steps of the trainer, side by side.
* ``timing``: seconds of a step of the trainer, peak memory, bytes of collectives, and communication
  that no computation hides (from a profile of one step).
* ``checkpoint``: saved on all GPUs, read by one and by processes on the CPU, bit by bit.

``python -m benchmarks.meshes.report meshes.json`` makes tables and a plot of it, and ``python -m
benchmarks.meshes.killed --ranks 2 configs/tiny.py --mesh.fsdp 2`` kills a rank of a run.
"""
