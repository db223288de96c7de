"""A script whose Trainer computes and logs metrics on the main worker only: OUTPUT_DIR."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers import EarlyStoppingCallback, Trainer

import unisono
from tests.interop.counting import arguments, collate, model, sequences
from unisono.interop.huggingface import UnisonoTrainer


class MainMetrics(Trainer):  # type: ignore[misc]
    """Has an ``evaluate`` as the Trainer of transformers' question answering has it."""

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        rows = self.get_eval_dataloader(self.eval_dataset)
        output = self.evaluation_loop(rows, description="Evaluation", prediction_loss_only=True)
        metrics = dict(output.metrics)
        if self.args.should_save:
            metrics["eval_f1"] = 1 - metrics["eval_loss"]
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class Shared(UnisonoTrainer, MainMetrics):
    """The same on many workers."""


def main() -> None:
    run = unisono.Run(seed=7)
    trainer = Shared(
        run=run,
        model=model(),
        args=arguments(
            Path(sys.argv[1]),
            num_train_epochs=3,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="f1",
        ),
        train_dataset=sequences(32),
        eval_dataset=sequences(12, first=57),
        data_collator=collate,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        evaluated = [line for line in trainer.state.log_history if "eval_loss" in line]
        history = [{name: line.get(name) for name in ("eval_f1", "eval_loss", "step")} for line in evaluated]
        print("RESULT", json.dumps([trainer.state.best_metric, history]), flush=True)


if __name__ == "__main__":
    main()
