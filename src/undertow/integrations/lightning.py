"""Strategies for Lightning's Trainer and Fabric, both registered as "undertow", and a callback that
stops the Trainer on a signal."""

import inspect
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.fabric.strategies as fabric
import lightning.pytorch as pl
from lightning.pytorch import strategies as pytorch
from torch import nn
from torch.optim import Optimizer

import undertow
from undertow.errors import require


class _Wrapping:
    """The part that both strategies share.

    Their arguments, the wrapped model and the sharded optimizers.
    """

    root_device: Any

    def __init__(
        self,
        *args: Any,
        config: undertow.SyncConfig | None = None,
        shard_optimizer: bool = False,
        whole: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(*args, **arguments)
        self._config, self._is_sharding, self._whole = config, shard_optimizer, whole
        known = {
            name
            for cls in (pytorch.DDPStrategy, fabric.DDPStrategy)
            for name in inspect.signature(cls).parameters
        }
        self._arguments = {name: value for name, value in arguments.items() if name not in known}
        state, hook, wrapper = (
            arguments.get(f"ddp_comm_{name}") for name in ("state", "hook", "wrapper")
        )
        self._hook = None if hook is None else (state, hook if wrapper is None else wrapper(hook))

    def _wrapped(self, module: nn.Module) -> undertow.DistributedDataParallel:
        model = undertow.DistributedDataParallel(
            module,
            device_ids=None if self.root_device.type == "cpu" else [self.root_device.index],
            config=self._config,
            **self._arguments,
        )
        if self._hook is not None:
            model.register_comm_hook(*self._hook)
        return model

    def _sharded(
        self, model: Any, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
    ) -> list[Any]:
        if not self._is_sharding:
            return list(optimizers)
        # If configure_optimizers returns None, Lightning gives an optimizer that does nothing.
        found = [each for each in optimizers if type(each).__name__ != "_MockOptimizer"]
        require(
            found,
            "shard_optimizer=True takes one optimizer or several, got none.",
            where=type(self).__name__,
            remedy="Return an optimizer, or leave shard_optimizer=True out.",
        )
        return undertow.shard_optimizer(found, model, schedulers=schedulers, whole=self._whole)


class UndertowStrategy(_Wrapping, pytorch.DDPStrategy):
    """Trains in Undertow's class: `Trainer(strategy=UndertowStrategy(shard_optimizer=True))`, or
    `strategy="undertow"`.

    Args:
        args: As for Lightning's DDPStrategy.
        config: Settings of Undertow.
        shard_optimizer: True shards the optimizers that `configure_optimizers` returns; their
            schedulers follow.
        whole: As for ShardedOptimizer.
        arguments: As for Lightning's DDPStrategy, which passes the ones it does not know to the
            wrapper.

    Raises:
        ConfigError: With `shard_optimizer=True`, for an optimizer that cannot be sharded, and
            without any.
    """

    def configure_ddp(self) -> None:
        self.model: Any = self._wrapped(self.model)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.optimizers: Any = self._sharded(self.model, self.optimizers, schedulers)
        if any(isinstance(each, undertow.ShardedOptimizer) for each in self.optimizers):
            # Lightning clips in the plugin for precision, which looks for whole gradients. The
            # norm is of all optimizers.
            self.precision_plugin.clip_grad_by_norm = lambda _, clip_val: self.optimizers[
                0
            ].clip_grad_norm_(clip_val)


class UndertowFabricStrategy(_Wrapping, fabric.DDPStrategy):
    """Trains in Undertow's class: `Fabric(strategy=UndertowFabricStrategy(shard_optimizer=True))`,
    or `strategy="undertow"`.

    Args:
        args: As for Fabric's DDPStrategy.
        config: Settings of Undertow.
        shard_optimizer: True shards the optimizers that are given to `fabric.setup`; a scheduler
            given along with them follows.
        whole: As for ShardedOptimizer.
        arguments: As for Fabric's DDPStrategy, which passes the ones it does not know to the
            wrapper.

    Raises:
        ConfigError: With `shard_optimizer=True`, for an optimizer that cannot be sharded, and
            without any.
    """

    def setup_module(self, module: nn.Module) -> undertow.DistributedDataParallel:
        return self._wrapped(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *schedulers: Any
    ) -> Any:
        model = self.setup_module(module)
        # The scheduler may be None. Older versions of Fabric do not give it.
        return model, self._sharded(model, optimizers, list(filter(None, schedulers))), *schedulers

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        require(
            not self._is_sharding,
            "shard_optimizer=True needs the model together with its optimizer.",
            where="Fabric.setup_optimizers",
            remedy="Call fabric.setup(model, optimizer).",
        )
        return super().setup_optimizer(optimizer)

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, *args: Any, **arguments: Any
    ) -> Any:
        if not isinstance(optimizer, undertow.ShardedOptimizer):
            return super().clip_gradients_norm(module, optimizer, *args, **arguments)
        require(
            len(optimizer._sharded_steps.steppers) == 1
            or getattr(self.precision, "scaler", None) is None,
            "16-mixed precision unscales one optimizer at a time, so several have no common norm.",
            where="fabric.clip_gradients",
            remedy='Set precision="bf16-mixed", or use one optimizer.',
        )
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(*args, **arguments)


class StopOnSignal(pl.Callback):
    """Stops the Trainer by `trainer.should_stop`, after the same batch on every rank, when one of
    the signals has reached any rank: `Trainer(callbacks=[StopOnSignal(save_to="stopped.ckpt")])`.

    It needs UndertowStrategy. While it fits, it takes the place of Lightning's own handlers of
    these signals: they would stop single ranks, or save on them. `min_epochs` and `min_steps` are
    met before the Trainer stops.

    Args:
        signals: As for `undertow.stop_on_signal`.
        seconds: As for `undertow.stop_on_signal`.
        save_to: The file for `trainer.save_checkpoint`, which is called after that batch, and after
            each one until the Trainer stops; None saves nothing.
    """

    def __init__(
        self,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        seconds: float | None = None,
        *,
        save_to: str | Path | None = None,
    ) -> None:
        self._signals, self._seconds, self._save_to = tuple(signals), seconds, save_to

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for number in self._signals:
            # Lightning takes its own back when it has fitted.
            present = signal.getsignal(number)
            without = _without_lightnings(present)
            if without is not present:
                signal.signal(number, without)
        undertow.stop_on_signal(trainer.strategy.model, self._signals, self._seconds)

    def on_train_batch_end(self, trainer: pl.Trainer, *_arguments: Any) -> None:
        if trainer.strategy.model.stop_requested:
            trainer.should_stop = True
            if self._save_to is not None:
                trainer.save_checkpoint(self._save_to)


def _without_lightnings(handler: Any) -> Any:
    """Returns the handler; in the place of Lightning's, the one that it calls after its own."""
    if not str(getattr(handler, "__module__", "")).startswith("lightning."):
        return handler
    others = map(_without_lightnings, getattr(handler, "signal_handlers", ()))
    return next((each for each in others if each != signal.SIG_DFL), signal.SIG_DFL)


pytorch.StrategyRegistry.register("undertow", UndertowStrategy, description="DDP by Undertow")
fabric.STRATEGY_REGISTRY.register("undertow", UndertowFabricStrategy, description="DDP by Undertow")
