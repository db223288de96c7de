"""Values in, values out: no I/O, no clock, no torch.

The tree, the plan, paces and shares, the order of the data, who is a member, which checkpoint is due.
"""
