"""``unisono doctor``: what of these machines will hurt a run, why, and what to do.

::

    facts      what one machine is, found out there        (effects, one function a fact)
    checks     facts of one machine -> findings            (pure, one function a check, in a table)
    together   facts of all machines -> findings           (pure, one function a check, in a table)
    asking     the program on a machine, which answers orders, and measures the way to another
    remote     the same program on every machine, by ssh
"""
