"""Pure layers: each module has ``Config``, ``Params``, ``specs(cfg)`` and ``apply(params, x, cfg,
*, sh)``.
"""
