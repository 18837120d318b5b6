"""What ranks of tests need, imported once: they are forked off a process that has it."""

import gc
import importlib

import pytest
import rich.console
import rich.table  # noqa: F401
import torch._dynamo
import torch.distributed._composable.replicate_with_fsdp
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.checkpoint.state_dict
import torch.utils.checkpoint  # noqa: F401
from _pytest.assertion import install_importhook

from support.warm import start_new_interpreters
from undertow import *  # noqa: F403  # all of its names: each brings its modules with it

start_new_interpreters()
# Asserts in ranks say what the values were, as they do where pytest itself imports a test.
_CONFIG = pytest.Config.fromdictargs({"assertmode": "rewrite"}, ["--disable-plugin-autoload", "-c", "/dev/null"])
install_importhook(_CONFIG).mark_rewrite("support")
# Most modules of tests need these: ranks of a test's own would take longer to import them than for many a test.
for _name in ("alike", "errors", "faults", "inside", "outer", "programs", "streamed", "tensor_parallel", "training"):
    importlib.import_module(f"support.{_name}")
gc.collect()
gc.freeze()  # ranks that looked through all of torch would copy its memory
