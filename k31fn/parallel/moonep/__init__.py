"""MoonEP: experts over ranks of which each has as many rows, whatever the router prefers
(Kimi K3 report, arXiv 2607.24653, section 5.2.1).

Experts that many tokens choose are copied, for one step, to ranks that have little to do.
:mod:`~k31fn.parallel.moonep.plan` says which experts and which rows go where;
:mod:`~k31fn.parallel.moonep.route` takes weights and tokens there and brings the results back.
Which experts a token goes to, and with which weights, stays as it is: outputs and gradients are
those of :mod:`k31fn.parallel.expert`.
"""
