"""HF Trainer: `torchrun with_transformers.py FILE`."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.randint(19, (32, 8), generator=torch.Generator().manual_seed(3))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        average_tokens_across_devices=True,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": it, "labels": it} for it in tokens])
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(dict(trainer.model.named_parameters()), sys.argv[1])
torch.distributed.destroy_process_group()
