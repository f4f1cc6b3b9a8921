"""Pure layers: each module has ``Config``, ``Params``, ``specs(cfg)`` and ``apply(params, x, cfg,
*, sh)``.

A module that can be a sublayer or the residual scheme of a model also has ``KIND``, its row in the
table :mod:`k31fn.layers.kinds`.
"""
