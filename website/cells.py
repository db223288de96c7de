# The cells of docs/notebook.ipynb, which `python -m website.notebook` executes. Text stands in comments.

# %% [markdown]
# ## One worker, three workers, and one that is killed
#
# The function below is the whole training. `launch` sends it to the workers by value, so nothing has to be saved to a
# file first.

# %%
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.record.history import History
from unisono.record.journal import compare


def train(killed_at=None):
    run = unisono.Run(seed=7)
    x = torch.rand(2048, 2) * 2 - 1
    data = TensorDataset(x, (x.prod(dim=1) > 0).long())  # are both coordinates of one sign?
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)

    for step in run.steps(data, batch_size=256, microbatches=8, epochs=5):
        if step.number == killed_at and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # no exception, no cleaning up: the process is gone
        for points, labels in step:
            logits = model(points)
            F.cross_entropy(logits, labels).backward()
            step.add(right=(logits.argmax(1) == labels).sum(), seen=len(labels))
        optimizer.step()
    return step.loss, float(run.totals["right"] / run.totals["seen"])


# %%
unisono.launch(train, workers=1, run_dir="runs/one")

# %% [markdown]
# The same on three workers. The loss and the accuracy are not near to those above, they are the same:

# %%
unisono.launch(train, workers=3, run_dir="runs/three")

# %% [markdown]
# And once more, while one of the three kills itself in step 20. The others finish that step, and another one joins:

# %%
unisono.launch(train, 20, workers=3, run_dir="runs/hurt")

# %% [markdown]
# Every gradient of every step, and the final model and optimizer, compared by their digests:

# %%
print(compare(Path("runs/one"), Path("runs/three")))
print(compare(Path("runs/one"), Path("runs/hurt")))

# %% [markdown]
# What happened to the workers of the last run is in its story:

# %%
for event in History(Path("runs/hurt")).events()["events"]:
    if event.get("reason") and event["kind"] != "membership":
        print(f"{event['kind']:13} {event.get('worker_id', ''):3} {event['reason']}")
