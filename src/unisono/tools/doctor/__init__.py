"""``unisono doctor``: what of these machines will hurt a run, why, and what to do.

::

    facts      what one machine is, found out there        (effects, one function a fact)
    checks     facts of one machine -> findings            (pure, one function a check, in a table)
    together   facts of all machines -> findings           (pure, one function a check, in a table)
    path       latency and bandwidth between two machines  (a small server and its client)
    hosts      the same program on every machine, by ssh, which answers orders
"""
