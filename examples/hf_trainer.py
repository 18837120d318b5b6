"""The HF Trainer with a sharded optimizer, on CPU.

Run with:

    torchrun --nproc-per-node=2 examples/hf_trainer.py
"""

from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

from undertow.integrations.transformers import UndertowTrainer


class Prints(TrainerCallback):
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step:3d}  loss {float(logs['loss']):.3f}")


def main() -> None:
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=16,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    start = torch.randint(16, (256, 1), generator=torch.Generator().manual_seed(0))
    rows = (start + torch.arange(16)) % 16  # each token is the one before plus one
    arguments = TrainingArguments(
        "hf_trainer",
        use_cpu=True,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_steps=40,
        logging_steps=10,
        save_steps=20,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = UndertowTrainer(
        model, arguments, train_dataset=data, callbacks=[Prints()], shard_optimizer=True
    )
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
