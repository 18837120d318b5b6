"""Trains with the Trainer of Hugging Face Transformers in Undertow's class."""

from collections.abc import Iterable
from typing import Any

import transformers

from undertow import ShardedOptimizer, SyncConfig, stop_on_signal
from undertow.integrations import accelerate


class UndertowTrainer(transformers.Trainer):
    """A `transformers.Trainer` that trains in Undertow's class.

        trainer = UndertowTrainer(model, arguments, train_dataset=dataset, shard_optimizer=True)

    Another Trainer takes it as its first base: `class Mine(UndertowTrainer, SFTTrainer)`.

    Args:
        args: As for the Trainer.
        sync_config: Settings of Undertow.
        shard_optimizer: True shards the optimizer; a scheduler that is given along with it follows.
        whole: As for ShardedOptimizer.
        stop_signals: Signals, of the module `signal`, after which all ranks save and stop after the
            same step, by the Trainer's own control. A process that trains alone ignores this.
        arguments: As for the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        sync_config: SyncConfig | None = None,
        shard_optimizer: bool = False,
        whole: bool | None = None,
        stop_signals: Iterable[int] = (),
        **arguments: Any,
    ) -> None:
        super().__init__(*args, **arguments)
        self._stop_signals = tuple(stop_signals)
        if self._stop_signals:
            self.add_callback(_StopOnSignal(self))
        self._sync_config, self._is_sharding, self._whole = (
            sync_config,
            shard_optimizer,
            whole,
        )
        self._sharded: ShardedOptimizer | None = None

    def create_optimizer(self, *args: Any, **arguments: Any) -> Any:
        super().create_optimizer(*args, **arguments)
        if self.model_wrapped is self.model:
            self.model_wrapped: Any = accelerate.prepare(
                self.accelerator, self.model, config=self._sync_config
            )
            trains_alone = self.model_wrapped is self.model
            if self._stop_signals and not trains_alone:
                stop_on_signal(self.model_wrapped, self._stop_signals)
            if self._is_sharding and not trains_alone:
                (self._sharded,) = accelerate.shard(
                    self.accelerator,
                    [self.optimizer],
                    self.model_wrapped,
                    # given with the optimizer; any other is made afterwards
                    filter(None, [self.lr_scheduler]),
                    whole=self._whole,
                )
                self.optimizer: Any = self._sharded
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call and self._sharded is not None and not self.args.save_only_model:
            # the Trainer asks for the state next, on rank 0 only
            self._sharded.consolidate_state_dict()


class _StopOnSignal(transformers.TrainerCallback):
    """Saves and stops when a signal has reached any rank."""

    def __init__(self, trainer: UndertowTrainer) -> None:
        self._trainer = trainer

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_others: Any,
    ) -> None:
        if getattr(self._trainer.model_wrapped, "stop_requested", False):
            control.should_training_stop = control.should_save = True
