"""The private parts of torch's DTensors and meshes that Undertow reads.

`tests/unit/torch_private` pins them.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_MODULE = "torch.distributed.tensor"  # imported by whatever makes a DTensor, and slow to import


def is_dtensor(tensor: object) -> bool:
    """Returns True for a DTensor, without importing the module of the class."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def is_class_of_dtensors(kind: type) -> bool:
    """Returns True for the class DTensor and its subclasses."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(kind, module.DTensor)


def local_of(dtensor: Any) -> Tensor:
    """Returns the tensor itself that a DTensor holds on this rank, without a node for autograd.

    Waits for a collective that is still writing it, and not for `watched_part`.
    """
    local: Tensor = sys.modules[_MODULE].DTensor._local_tensor.__get__(dtensor)
    # The class of results of functional collectives; a plain tensor has arrived.
    if type(local) is not Tensor and hasattr(local, "wait"):
        local = local.wait()
    return local


def watched_part(arrive: Callable[[Any], object]) -> dict[str, Any]:
    """Returns members of a subclass of DTensor: a read of the part calls `arrive` first. Torch's
    own methods, such as `to_local` and `full_tensor`, and its dispatch read it so."""
    slot = sys.modules[_MODULE].DTensor._local_tensor

    def get(dtensor: Any) -> Tensor:
        arrive(dtensor)
        local: Tensor = slot.__get__(dtensor)
        return local

    return {"_local_tensor": property(get, slot.__set__)}


def dtensor_of(local: Tensor, spec: Any) -> Tensor:
    """Returns a DTensor that holds this tensor itself; `DTensor.from_local` holds a view of it."""
    made: Tensor = sys.modules[_MODULE].DTensor(local, spec, requires_grad=False)
    return made


def spec_for_gradient(dtensor: Any, dtype: torch.dtype) -> Any:
    """Returns the placement of a gradient of this dtype: the parameter's."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(dtensor.shape, dtensor.stride(), dtype)
    return DTensorSpec(dtensor.device_mesh, dtensor.placements, tensor_meta=meta)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that this one is a part of, or the mesh itself."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Returns one dimension over the ranks of these dimensions of a mesh; a collective call."""
    return mesh[tuple(names)]._flatten()
