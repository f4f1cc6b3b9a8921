"""What a step will hold and send, found before a run by running it on meta tensors.

- :mod:`~k31fn.trainer.forecast.abstract_rank`: one rank's step without values or other ranks.
- :mod:`~k31fn.trainer.forecast.few_layers`: the same model with a layer or two of each kind.
- :mod:`~k31fn.trainer.forecast.rank_weights`: bytes that a rank holds of each weight.
- :mod:`~k31fn.trainer.forecast.collective_volume`: what it sends in a step.
- :mod:`~k31fn.trainer.forecast.memory`: bytes that it needs in a step.
- :mod:`~k31fn.trainer.forecast.shape_cache`: makes such runs fast.
"""
