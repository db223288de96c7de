"""Whether a script keeps the promise, and the line that breaks it: what ``unisono check`` is made of.

The first steps of the script are computed several times, in other ways each time (`trials`). Each worker writes down
what it has computed (`records`). Where two trials part (`comparing`), both are computed again, and each worker also
writes what every statement of the script reads and writes (`tracing`, `values`). The first statement of which that
differs, among those on which the gradients depend (`statements`), is where the script broke the promise (`blame`).
"""
