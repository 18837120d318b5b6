"""Implements `undertow env`: the facts about a machine that a bug report needs."""

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from undertow.version import __version__

_PACKAGES = (
    *("torch", "numpy", "rich", "typer", "matplotlib", "plotly"),
    *("accelerate", "lightning", "ray", "torchft-nightly", "transformers", "deepspeed"),
)
# Settings that change how training runs. The values of all other variables may be secrets.
_VARIABLES = re.compile(
    r"(OMP|MKL)_NUM_THREADS|(GLOO|TP)_SOCKET_IFNAME|(NCCL|TORCH_NCCL|UNDERTOW)_\w+|TORCH_DISTRIBUTED_DEBUG|USE_LIBUV"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS)|PYTORCH_(CUDA_)?ALLOC_CONF|CUBLAS_WORKSPACE_CONFIG"
)
_INTERFACES = Path("/sys/class/net")
_LONGEST = 200  # characters of a value: UNDERTOW_PLAN may hold a whole plan


def show_environment() -> None:
    """Prints versions, backends, devices, the machine and the variables that matter, as JSON."""
    print(json.dumps(_facts(), indent=2))


def _facts() -> dict[str, dict[str, Any]]:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    return {
        "undertow": {"version": __version__},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
        },
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
        "torch": _torch(),
        "machine": {
            "os": platform.platform(),
            "cores": os.cpu_count(),
            # macOS has no affinity.
            "usable cores": len(
                getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 0))(0)
            ),
            "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        },
        # Of Linux: up, down or unknown. Never an address.
        "interfaces": {
            path.parent.name: path.read_text().strip()
            for path in sorted(_INTERFACES.glob("*/operstate"))
        },
        "variables": {
            name: value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def _torch() -> dict[str, Any]:
    """Returns torch's backends and devices, or the reason why it cannot be imported.

    A report of that needs the rest.
    """
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # as torch's libraries raise it
        return {"not imported": f"{type(error).__name__}: {error}"}
    nccl: Any = torch.cuda.nccl
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, nccl.version()))
        if dist.is_available() and dist.is_nccl_available()
        else False,
        "cuda": torch.version.cuda,
        **{
            f"device {number}": f"{it.name}, {it.total_memory / 1e9:.1f} GB"
            for number, it in enumerate(devices)
        },
    }
