"""A script for Hugging Face's Trainer: OUTPUT_DIR [CHECKPOINT]. The main worker prints what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers import EarlyStoppingCallback

import unisono
from tests.interop.counting import Lines, accuracy, arguments, collate, model, most_likely, sequences
from unisono.interop.huggingface import UnisonoTrainer

TIMES = ("runtime", "second", "time")


def main() -> None:
    folder, checkpoint = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    run = unisono.Run(seed=7, checkpoint=unisono.Checkpoints(every_steps=11))
    trainer = UnisonoTrainer(
        run=run,
        model=model(),
        args=arguments(
            folder,
            num_train_epochs=3,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            lr_scheduler_type="cosine",
            include_num_input_tokens_seen="non_padding",
            eval_on_start=True,
        ),
        train_dataset=sequences(57),
        eval_dataset=sequences(21, first=57),
        data_collator=collate,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    predicted = trainer.predict(Lines(sequences(5, first=80)))
    if trainer.is_world_process_zero():
        history = [line for line in trainer.state.log_history if "train_loss" not in line]
        common = [{name: line[name] for name in sorted(line) if not name.endswith(TIMES)} for line in history]
        best = {"best": trainer.state.best_metric, "step": trainer.state.best_global_step}
        print("RESULT", json.dumps([common, best, predicted.predictions.tolist()]), flush=True)


if __name__ == "__main__":
    main()
