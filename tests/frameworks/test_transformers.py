"""The Trainer of transformers trains through Undertow's class as through torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.frameworks import Wrapper, require_installed, same_as_torch, state_of, torchs_name_is
from support.ranks import Ranks

require_installed("transformers", "accelerate")


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 19, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0))


def trainer_of(folder: Path, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "dataloader_pin_memory": False}
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        **{"save_strategy": "no", **quiet, **settings},
    )
    tokens = torch.randint(19, (20, 8), generator=torch.Generator().manual_seed(3))
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(language_model(), arguments, train_dataset=examples)


def trained(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    with torchs_name_is(wrapper):
        # Five batches on each rank: the last step of an epoch has one micro-batch less.
        trainer = trainer_of(folder, num_train_epochs=2, gradient_accumulation_steps=3, max_grad_norm=0.1)
        trainer.train()
    return state_of(trainer.model)


def test_the_trainer_accumulates_and_clips_as_with_torchs_class(framework_ranks: Ranks, tmp_path: Path) -> None:
    same_as_torch(framework_ranks, trained, tmp_path)


def resumed(wrapper: Wrapper, folder: Path) -> dict[str, Tensor]:
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    with torchs_name_is(wrapper):
        trainer_of(folder, max_steps=2, **saving).train()
        trainer = trainer_of(folder, max_steps=4, **saving)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    return state_of(trainer.model)


def test_the_trainer_saves_and_resumes(framework_ranks: Ranks, tmp_path: Path) -> None:
    same_as_torch(framework_ranks, resumed, tmp_path)
