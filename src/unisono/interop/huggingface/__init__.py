"""Hugging Face's ``Trainer`` on any number of workers, with the same bits.

::

    run = unisono.Run("runs/text", seed=7)  # before the model
    trainer = UnisonoTrainer(model=model, args=args, train_dataset=train_set, run=run)
    trainer.train()

To the Trainer each worker is the only process, and its "batch" is a step: the global batch, of which
`UnisonoTrainer.training_step` computes this worker's micro-batches. See docs/huggingface.md.
"""

from unisono.interop.huggingface.trainer import UnisonoTrainer

__all__ = ["UnisonoTrainer"]
