"""Wrappers and attach(): what they start from, arguments that cannot work, and what of torch's there is besides training."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from support.alike import backward_alike, of_all_ranks, require_equal_gradients
from support.errors import text_of
from support.inside import of_version, on_device
from support.levels import some
from support.models import CASES, Branches, mlp, noise
from support.naive import naive_mean, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from support.sharded import destroy
from undertow import (
    BucketedDDPHooks,
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    SyncConfig,
    WrongType,
    attach,
)

WRAP: dict[str, Callable[..., Any]] = {"DistributedDataParallel": DistributedDataParallel, "attach": attach}
MLP = CASES["mlp"]


@in_ranks(2, 3)
@pytest.mark.parametrize("way", WRAP)
def test_parameters_and_buffers_of_rank_0_arrive_everywhere(way: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = CASES["convolutions"].make()
    model[2].weight.requires_grad_(False)
    for name, buffer in model.named_buffers():
        buffer.fill_(dist.get_rank() + len(name))
    wanted = of_all_ranks(copy.deepcopy(model.state_dict()))[0]
    WRAP[way](model).close()
    assert (
        model.state_dict().keys(),
        [name for name, value in model.state_dict().items() if not torch.equal(value, wanted[name])],
    ) == (wanted.keys(), [])


class Adapted(nn.Module):
    """Lists its adapter only, as models do for optimizers, by the method that `lists` names."""

    def __init__(self, lists: str) -> None:
        super().__init__()
        self.body, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        setattr(self, lists, getattr(self.adapter, lists))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.norm(self.body(x)))


@in_ranks(2)
@pytest.mark.parametrize(
    "lists", some(["named_parameters", "parameters", "named_modules", "modules", "named_buffers", "children"], most=2)
)
@pytest.mark.parametrize("way", WRAP)
def test_all_that_is_registered_is_averaged_whatever_the_model_lists(way: str, lists: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = Adapted(lists)
    handle = WRAP[way](model, config=SyncConfig(bucket_cap_mb=1e-6))
    called = model if way == "attach" else handle
    for step in range(2):
        called(noise(3, 4, step=step)).square().sum().backward()
        grads = [model.body.weight.grad, model.body.bias.grad, model.adapter.weight.grad, model.norm.weight.grad]
        assert torch.equal(*of_all_ranks(torch.cat([grad.flatten() for grad in grads])))
    assert torch.equal(*of_all_ranks(torch.cat([model.body.weight, model.adapter.weight]).detach()))
    called(noise(3, 4))
    assert torch.allclose(*of_all_ranks(model.norm.num_batches_tracked.float()))
    handle.close()


UNAVERAGED = (
    "{} was registered on the wrapper, not on its module: it is not synchronized.\n"
    "  DistributedDataParallel, rank {}\n"
    "  Register it on model.module, or on the module before it is wrapped."
)
OTHER = (
    "model.module was Sequential when it was wrapped, and now is {}: gradients of the new module are not averaged.\n"
    "  DistributedDataParallel, rank {}\n"
    "  Wrap the new module, after close() of this wrapper; or change parts inside of model.module."
)
ON_THE_WRAPPER: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a head": (lambda ddp: setattr(ddp, "head", nn.Linear(3, 3)), UNAVERAGED.format("'head.weight'", "{}")),
    "a parameter": (lambda ddp: setattr(ddp, "scale", nn.Parameter(torch.ones(3))), UNAVERAGED.format("'scale'", "{}")),
    "a buffer": (lambda ddp: ddp.register_buffer("mean", torch.ones(3)), UNAVERAGED.format("'mean'", "{}")),
    "another module": (lambda ddp: setattr(ddp, "module", nn.Flatten()), OTHER.format("Flatten", "{}")),
    "no module": (lambda ddp: delattr(ddp, "module"), OTHER.format("NoneType", "{}")),
}


@in_ranks(2)
@pytest.mark.parametrize("what", ON_THE_WRAPPER)
def test_what_is_put_on_the_wrapper_itself_is_an_error_in_the_next_forward(what: str) -> None:
    change, text = ON_THE_WRAPPER[what]
    with wrapped(mlp()) as ddp:
        MLP.loss(ddp, 0).backward()
        change(ddp)
        assert text_of(ConfigError, lambda: MLP.loss(ddp, 1)) == text.format(dist.get_rank())


HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "a loss": lambda ddp: setattr(ddp, "loss", nn.CrossEntropyLoss(weight=torch.ones(3))),
    "a frozen teacher": lambda ddp: setattr(ddp, "teacher", mlp().requires_grad_(False)),
    "a part of the module": lambda ddp: setattr(ddp, "head", ddp.module[2]),
    "a parameter of the module": lambda ddp: setattr(ddp, "weight", ddp.module[2].weight),
    "the same module": lambda ddp: setattr(ddp, "module", ddp.module),
    "the compiled module": lambda ddp: setattr(ddp, "module", torch.compile(ddp.module, backend="eager")),
}


@in_ranks(2)
@pytest.mark.parametrize("what", some(HARMLESS, most=2))
def test_what_has_no_gradient_of_its_own_may_be_put_on_the_wrapper(what: str) -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        HARMLESS[what](ddp)
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                MLP.loss(model, step).backward()
            naive_mean(bare)
            require_equal_gradients(ddp.module, bare)


# Arguments, the warning that they cause, whose parameters and buffers are there afterwards (-1: each rank's own), and
# whether buffers follow rank 0 in training.
RENAMED, IGNORED = (
    f"`broadcast_buffers` is deprecated{what} Unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still makes buffers "
    "equal at the start."
    for what in (". Use `forward_sync_buffers` instead.", " and ignored when `forward_sync_buffers` is provided.")
)
STARTS: list[tuple[dict[str, bool], list[str], int, int, bool]] = [
    ({}, [], 0, 0, True),
    ({"init_sync": False}, [], -1, -1, True),
    ({"forward_sync_buffers": True}, [], 0, 0, True),
    ({"forward_sync_buffers": False}, [], 0, 0, False),
    ({"broadcast_buffers": True}, [RENAMED], 0, 0, True),
    ({"broadcast_buffers": False}, [RENAMED], 0, -1, False),
    ({"broadcast_buffers": False, "forward_sync_buffers": True}, [IGNORED], 0, 0, True),
    ({"broadcast_buffers": True, "forward_sync_buffers": False}, [IGNORED], 0, 0, False),
    ({"broadcast_buffers": False, "init_sync": False}, [RENAMED], -1, -1, False),
]


@in_ranks(2, 3)
@pytest.mark.parametrize(("arguments", "said", "parameters_of", "buffers_of", "follows"), some(STARTS, most=3), ids=str)
def test_who_follows_rank_0_at_the_start_is_as_torchs_arguments_say(
    arguments: dict[str, bool], said: list[str], parameters_of: int, buffers_of: int, follows: bool
) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.tensor(float(dist.get_rank())))
    model.weight.data.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model, **arguments)
    ddp.close()
    assert [(str(each.message), each.category, each.filename == __file__) for each in caught] == [
        (text, FutureWarning, True) for text in said
    ]
    expected = [dist.get_rank() if source < 0 else source for source in (parameters_of, buffers_of)]
    assert [model.weight.item(), model.table.item(), ddp.forward_sync_buffers] == [*expected, follows]


# What the last rank, {rank}, does to its model; how many parameters it has; the first difference.
PARAMETERS = "ranks disagree on the parameters."
OTHERS = "ranks disagree on the frozen parameters or the buffers."
CHANGES: dict[str, tuple[Callable[[Any], object], str, int, str]] = {
    "renamed": (
        lambda model: model.add_module("other", model.pop(3)),
        PARAMETERS,
        6,
        "parameter 4 is '3.weight' on rank 0 and 'other.weight' on rank {rank}",
    ),
    "another shape": (
        lambda model: model.__setitem__(3, nn.Linear(5, 2)),
        PARAMETERS,
        6,
        "shape of parameter 4 ('3.weight') is [2, 4] on rank 0 and [2, 5] on rank {rank}",
    ),
    "another dtype": (
        lambda model: model[3].double(),
        PARAMETERS,
        6,
        "dtype of parameter 4 ('3.weight') is float32 on rank 0 and float64 on rank {rank}",
    ),
    "another layout": (
        lambda model: setattr(model[3], "weight", nn.Parameter(torch.zeros(4, 2).t())),
        PARAMETERS,
        6,
        "axes in memory of parameter 4 ('3.weight') is [0, 1] on rank 0 and [1, 0] on rank {rank}",
    ),
    "one missing": (
        lambda model: model.__delitem__(3),
        PARAMETERS,
        4,
        "parameter 4 is '3.weight' on rank 0 and missing on rank {rank}",
    ),
    "frozen": (
        lambda model: model[2].weight.requires_grad_(False),
        PARAMETERS,
        5,
        "parameter 2 is '2.weight' on rank 0 and '2.bias' on rank {rank}",
    ),
    "another frozen one": (
        lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False)),
        OTHERS,
        6,
        "tensor 0 is missing on rank 0 and 'extra' on rank {rank}",
    ),
    "another buffer": (
        lambda model: model.register_buffer("table", torch.zeros(3, dtype=torch.int64)),
        OTHERS,
        6,
        "tensor 0 is missing on rank 0 and 'table' on rank {rank}",
    ),
}


@in_ranks(2, 3)
@pytest.mark.parametrize("way", WRAP)
@pytest.mark.parametrize("name", some(CHANGES, most=3))
def test_ranks_with_different_models_are_told_the_first_difference(name: str, way: str) -> None:
    change, what, num_params, difference = CHANGES[name]
    last, model = dist.get_world_size() - 1, nn.Sequential(*mlp(), nn.Linear(4, 2))
    if dist.get_rank() == last:
        change(model)
    text = text_of(PlanMismatch, lambda: WRAP[way](model))
    assert of_all_ranks(text) == [text] * dist.get_world_size()
    first, second, *rest = text.splitlines()
    assert (first, second.startswith("  rank 0: 6 parameters, fingerprint ")) == (what, True)
    assert f"   rank {last}: {num_params} parameters, fingerprint " in second
    assert rest == [
        f"  first difference: {difference.format(rank=last)}",
        "  Build the model the same way on every rank before wrapping it.",
    ]


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_cap_mb", (None, 4.0)),
        ("overlap", (True, False)),
        ("order", ("observed", "reverse")),
        ("buffers", ("rank0", "off")),
        ("torch", ("1.0", "1.1")),
        ("undertow", ("1.0", "1.1")),
    ],
)
def test_ranks_with_different_settings_or_versions_are_told_the_first_difference(name: str, values: tuple[Any, Any]) -> None:
    value = values[dist.get_rank() > 0]
    pretending = {"torch": mock.patch.object(torch, "__version__", value), "undertow": of_version(value)}
    with pretending.get(name, contextlib.nullcontext()):
        config = SyncConfig(**({} if name in pretending else {name: value}))
        first, _, *rest = text_of(PlanMismatch, lambda: attach(mlp(), config=config)).splitlines()
    assert first == "ranks disagree on the settings."
    assert rest == [
        f"  first difference: {name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1",
        "  Give every rank the same settings and the same versions.",
    ]


@in_ranks(2, 3)
@pytest.mark.parametrize("close", ["in between", "at the end"])
@pytest.mark.parametrize("later", WRAP)
@pytest.mark.parametrize("earlier", [*WRAP, "attach to a part"])
def test_a_module_may_be_wrapped_anew(earlier: str, later: str, close: str) -> None:
    """Gradients are averaged once, whoever is closed in between."""
    model = mlp()
    bare = copy.deepcopy(model)
    first = attach(model[0]) if earlier == "attach to a part" else WRAP[earlier](model)
    if earlier in WRAP:
        backward_alike(model if earlier == "attach" else first, bare, MLP.loss, steps=[0])
    second = WRAP[later](model)
    called = model if later == "attach" else second
    backward_alike(called, bare, MLP.loss, steps=[1])
    if close == "in between":
        first.close()
    backward_alike(called, bare, MLP.loss, steps=[2, 3])
    for sync in (second, first, second):
        sync.close()
    attach(model[0]).close()  # what was closed is free, in parts too
    backward_alike(model, bare, MLP.loss, steps=[4], mean=lambda _: None)  # and now each rank trains alone


@in_ranks(2, 3)
def test_a_part_of_what_is_wrapped_is_not_wrapped_again() -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        model = ddp.module
        calls = [lambda: attach(model[0]), lambda: DistributedDataParallel(model[0]), lambda: attach(model, ignore=["2.bias"])]
        assert {text_of(ConfigError, call).replace("'weight'", "'0.weight'") for call in calls} == {
            "a part of this module is synchronized already.\n"
            "  parameter '0.weight' belongs to an earlier attach() or DistributedDataParallel\n"
            "  If the earlier one is no longer trained, call its close(). If two models share a part, wrap "
            "one module that holds both, or name the part in `ignore` of one of them."
        }
        backward_alike(ddp, bare, MLP.loss)  # the earlier one goes on


@in_ranks(2)
def test_one_of_two_models_may_leave_the_part_that_they_share_to_the_other() -> None:
    encoder, heads = nn.Linear(6, 4), [nn.Linear(4, 2), nn.Linear(4, 1)]
    actor, critic = (nn.Sequential(encoder, head) for head in heads)
    both = nn.ModuleList([actor, critic])
    bare: Any = copy.deepcopy(both)
    with contextlib.closing(attach(actor)), contextlib.closing(attach(critic, ignore=[encoder])):
        backward_alike(both, bare, lambda models, step: sum(MLP.loss(each, step) for each in models))


# As those of torchao: its values are in other tensors, and hardly any operation is defined.
class Quantized(Tensor):
    @staticmethod
    def __new__(cls, values: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(function)


@in_ranks(2)
@pytest.mark.parametrize("wrap", WRAP)
def test_a_parameter_without_memory_is_refused_by_name_and_may_be_ignored(wrap: str) -> None:
    model = nn.Linear(2, 2)
    model.table = nn.Parameter(Quantized(torch.ones(2, 2)), requires_grad=False)
    assert text_of(ConfigError, lambda: WRAP[wrap](model)) == (
        "parameter 'table' is a Quantized without its own memory: "
        "it cannot be sent to other ranks.\n"
        f"  {wrap}(...)\n"
        "  Exclude it with ignore=['table'], and give it the same values on every rank."
    )
    with contextlib.closing(attach(model, ignore=["table"])):
        model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
        assert model.weight.grad.unique().tolist() == [1.5]


@in_ranks(2)
@pytest.mark.parametrize("by_settings", [False, True])
@pytest.mark.parametrize("way", WRAP)
def test_sharded_parameters_may_be_ignored_and_a_mesh_of_one_dimension_names_the_ranks(way: str, by_settings: bool) -> None:
    """Tensor parallelism's, for example, whose gradients are no affair of ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    how = {"config": SyncConfig(ignore=("1.weight",))} if by_settings else {"ignore": (it for it in [model[1]])}
    with contextlib.closing(WRAP[way](model, **how, device_mesh=mesh)):
        model[0](torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert torch.equal(model[0].weight.grad, torch.full((2, 2), (dist.get_world_size() + 1) / 2))


@in_ranks(2)
def test_ranks_may_have_devices_of_different_numbers() -> None:
    with on_device(f"cuda:{dist.get_rank()}"):
        attach(mlp()).close()


@in_ranks(2)
@pytest.mark.parametrize("arguments", [{"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [0]}], ids=str)
def test_a_cap_of_zero_gives_every_parameter_a_bucket_as_in_torch(arguments: dict[str, Any]) -> None:
    with contextlib.closing(DistributedDataParallel(mlp(), **arguments)) as ddp:
        assert len(ddp.plan.buckets) == 4


NOTHING = (
    r"^{} has no parameter that requires a gradient: nothing is averaged until it has one\.\n"
    r"  {}\(\.\.\.\)\n"
    r"  Look at requires_grad, and at what `ignore` names\. If parameters are unfrozen later, filter this warning\.$"
)


@in_ranks(2, 3, is_fresh=True)
@pytest.mark.parametrize("kind", some(["Linear", "Flatten"], most=1))
@pytest.mark.parametrize("way", some(WRAP, most=1))
def test_a_rank_that_trains_nothing_needs_no_other_one_before_it_finishes_or_steps(way: str, kind: str) -> None:
    module = {"Linear": nn.Linear(4, 3), "Flatten": nn.Flatten()}[kind].requires_grad_(False)
    with pytest.warns(UserWarning, match=NOTHING.format(kind, way)):
        model = WRAP[way](module)
    called: Callable[..., Any] = model if isinstance(model, nn.Module) else module
    x, store = torch.ones(2, 4, requires_grad=True), dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.SGD([x], lr=0.1)
    if dist.get_rank() == 1:
        store.wait([f"left {way}"])
    for _ in range(2 if dist.get_rank() == 1 else 0):
        called(x).sum().backward()
        called(x).sum().backward()
        optimizer.step()
    assert x.grad is None or kind == "Linear" or torch.equal(x.grad, torch.full((2, 4), 4.0))
    if dist.get_rank() == 0:
        store.set(f"left {way}", "")
    model.finish()
    model.close()


# What of torch's there is besides the training step: attributes, hooks, switches, what trainers ask for.

# Public attributes that torch's class has and nn.Module has not: those that ours overrides, and those that it lacks.
DEFINED = {
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "join",
    "join_device",
    "join_hook",
    "join_process_group",
    "logger",
    "no_sync",
    "parameters_to_ignore",
    "process_group",
    "reducer",
    "register_comm_hook",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "will_sync_module_buffers",
}
MISSING = {
    "batched_grad_copy",
    "bucket_bytes_cap_default",
    "bucket_bytes_cap_list",
    "is_multi_device_module",
    "mixed_precision",
    "modules_buffers",
    "named_module_buffers",
    "skip_all_reduce_unused_params",
    "use_side_stream_for_tensor_copies",
}


@in_ranks(2)
def test_every_attribute_of_torchs_class_is_overridden_or_inherited_on_purpose() -> None:
    names = {name for name in dir(TorchDistributedDataParallel(mlp())) if not name.startswith("_")} - set(dir(nn.Module()))
    assert {name for name in names if name in vars(DistributedDataParallel)} == DEFINED
    values = {
        "dim": 0,
        "device_ids": None,
        "output_device": None,
        "device_type": "cpu",
        "device_mesh": None,
        "static_graph": False,
        "device": torch.device("cpu"),
        "process_group": dist.group.WORLD,
        "join_process_group": dist.group.WORLD,
        "join_device": torch.device("cpu"),
    }
    with wrapped(mlp()) as ddp:
        assert {name for name in names if not hasattr(ddp, name)} == MISSING
        assert isinstance(ddp, TorchDistributedDataParallel)
        assert (isinstance(ddp, Joinable), {name: getattr(ddp, name) for name in values}) == (True, values)


def test_the_constructor_has_torchs_arguments_in_torchs_order() -> None:
    torchs = list(inspect.signature(TorchDistributedDataParallel.__init__).parameters)
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    # An older torch has fewer; newer ones would show here.
    assert [name for name, it in ours.items() if it.kind is it.POSITIONAL_OR_KEYWORD][: len(torchs)] == torchs


def test_the_reducer_answers_frameworks() -> None:
    reducer = DistributedDataParallel.reducer
    assert reducer.prepare_for_backward([]) is reducer._delay_all_reduce() is reducer._rebuild_buckets() is None


ONCE = (
    "register_comm_hook can only be called once, and not within a backward.\n"
    "  {}\n"
    "  Write one hook that calls the others, and register it before training."
)


@in_ranks(2, 3)
def test_what_hooks_and_switches_refuse() -> None:
    with wrapped(mlp()) as ddp:
        assert text_of(WrongType, lambda: ddp.register_comm_hook(None, "allreduce")) == (
            "Communication hook must be callable, got str.\n"
            "  register_comm_hook(state, hook)\n"
            "  Pass a function hook(state, bucket) that returns a torch.futures.Future."
        )
        in_backward = next(ddp.parameters()).register_hook(lambda _: ddp.register_comm_hook(None, allreduce_hook))
        assert text_of(PhaseError, MLP.loss(ddp, 0).backward) == ONCE.format("gradients are being synchronized")
        in_backward.remove()
        MLP.loss(ddp, 0).backward()
        ddp.register_comm_hook(None, allreduce_hook)
        assert text_of(PhaseError, lambda: ddp.register_comm_hook(None, allreduce_hook)) == ONCE.format(
            "allreduce_hook is registered"
        )


@in_ranks(2)
def test_buffers_are_synchronized_unless_a_switch_is_off_or_there_are_none() -> None:
    case = CASES["convolutions"]
    with wrapped(case.model()) as ddp:
        assert ddp.will_sync_module_buffers()
        ddp.require_forward_param_sync = False
        assert not ddp.will_sync_module_buffers()
    with wrapped(mlp()) as bare, wrapped(case.model(), buffers="off") as ddp:
        assert (bare.will_sync_module_buffers(), ddp.will_sync_module_buffers()) == (False, False)


@in_ranks(2, 3)
def test_switches_of_torchs_are_accepted() -> None:
    model = mlp()
    with wrapped_and_bare(model, bucket_cap_mb=1e-6) as (ddp, bare):
        ddp._set_static_graph()
        for is_required in (False, True):  # of which no_sync() is the context
            ddp.require_backward_grad_sync = is_required
            assert (ddp.require_backward_grad_sync, ddp.sync.is_accumulating) == (is_required, not is_required)
            ddp.is_accumulating = is_required  # the opposite, which the wrapper has too
            assert (ddp.require_backward_grad_sync, ddp.is_accumulating) == (not is_required, is_required)
            ddp.is_accumulating = not is_required
        backward_alike(ddp, bare, MLP.loss, steps=[0])
        assert ddp._get_ddp_logging_data() == {"can_set_static_graph": False}
        ddp._remove_autograd_hooks()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def with_last(change: Callable[[nn.Module], object]) -> nn.Module:
    model = mlp()
    change(model[2])
    return model


ONLY_ON_DEVICES = (
    "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules, but got "
    "device_ids {}, output_device {}, and module parameters {}.\n"
    "  DistributedDataParallel(...)\n"
    "  Move the module to its GPU first: module.cuda(local_rank). On CPU, and for modules on several devices, leave both out."
)
ONE_MESH = (
    "Only 1D device mesh is supported, but got MESH.\n"
    "  the ranks over which gradients are averaged, with strategy=None\n"
    '  Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under which the first of two dimensions '
    "replicates and the second shards."
)
MESH_OR_GROUP = (
    "Cannot specify both process_group and device_mesh arguments.\n"
    "  the ranks over which gradients are averaged\n"
    '  Give process_group=, or one dimension of a mesh, such as mesh["dp"].'
)
SIZE = (
    "bucket_cap_mb must be a positive number of MiB, got {}.\n"
    "  SyncConfig\n"
    "  Give a number above zero, such as 25, or leave it out for a planned size."
)
BATCH_NORM = (
    "SyncBatchNorm layers only work with GPU modules.\n"
    "  DistributedDataParallel(...)\n"
    "  Keep the BatchNorm layers on CPU: their running statistics follow rank 0."
)
SHARDED = (
    "the mesh axis 'dp' is not a data-parallel axis: ranks 0, 1 hold different parts of parameter 'weight'.\n"
    "  gradients are averaged over ranks 0, 1\n"
    '  Give the data-parallel axis of the mesh, such as device_mesh=mesh["dp"], and distribute parameters over other axes only.'
)
EXPANDED = (
    "parameter 'weight' is an expanded tensor: several of its elements share memory.\n"
    "  {}(...)\n"
    "  Make the parameter of a clone() of it, or expand it in forward."
)
INFERRED = (
    "parameter 'weight' was made under torch.inference_mode(): it never gets a gradient.\n"
    "  {}(...)\n"
    "  Make the model outside of inference mode, or freeze the parameter: requires_grad_(False)."
)


@in_ranks(2)
@pytest.mark.parametrize(("call", "caller"), [(DistributedDataParallel, "DistributedDataParallel"), (attach, "attach")])
def test_parameters_that_cannot_be_written_are_refused_by_their_names(call: Callable[..., object], caller: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(3).expand(2, 3), requires_grad=False)
    assert text_of(ConfigError, lambda: call(model)) == EXPANDED.format(caller)
    with torch.inference_mode():
        inferred = nn.Linear(3, 2, bias=False)
    assert text_of(ConfigError, lambda: call(inferred)) == INFERRED.format(caller)


@in_ranks(2)
def test_a_frozen_parameter_made_in_inference_mode_takes_over_rank_0s_values() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(2, 2, bias=False)
        frozen.weight.fill_(dist.get_rank() + 1)
    model = nn.Sequential(frozen.requires_grad_(False), nn.Linear(2, 1))
    with wrapped(model) as ddp:
        ddp(torch.ones(1, 2)).sum().backward()
    assert frozen.weight.unique().tolist() == [1.0]


ARGUMENTS = {
    "no group": "process_group must be a torch.distributed.ProcessGroup, got str.\n"
    "  the group over which gradients are averaged\n"
    "  Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap.",
    "group in second place": "device_ids must not be a process group.\n"
    "  DistributedDataParallel, second argument\n"
    "  Write DistributedDataParallel(module, process_group=group).",
    "settings in second place": "device_ids must not be a SyncConfig.\n"
    "  DistributedDataParallel, second argument\n"
    "  Write DistributedDataParallel(module, config=config).",
    "no module": "module must be a torch.nn.Module, got list.\n"
    "  DistributedDataParallel, first argument\n"
    "  Pass the model itself.",
    "torch's wrapper": "this module is wrapped already, by torch's own DistributedDataParallel.\n"
    "  DistributedDataParallel(torch.nn.parallel.DistributedDataParallel(...))\n"
    "  Wrap the bare module once, without torch's class.",
    "two device types": "DistributedDataParallel's input module must be on the same type of devices, but input module "
    "parameters locate in ['cpu', 'meta'].\n"
    "  DistributedDataParallel(...)\n"
    "  Move the whole module with module.to(device) before.",
    "sync batch norm": BATCH_NORM,
    "no shape": "Modules with uninitialized parameters can't be used with `DistributedDataParallel`.\n"
    "  parameter '2.weight' has no shape yet\n"
    "  Run a dummy forward pass to correctly initialize the modules.",
    "sharded": SHARDED,
    "no values": "parameter '0.weight' is on the meta device, and has no values.\n"
    "  attach(...)\n"
    "  Give the module memory by module.to_empty(device=...), and initialize it, before.",
    "sparse": "parameter '2.weight' has the layout torch.sparse_coo, and only dense parameters are synchronized.\n"
    "  DistributedDataParallel(...)\n"
    "  Make it dense by to_dense(); or name it in `ignore`, and every rank has its own gradient.",
    "no leaf": "parameter '2.weight' is the result of an operation, and no optimizer can update it.\n"
    "  DistributedDataParallel(...)\n"
    "  Make it a leaf by detach().requires_grad_(). A module of TorchScript is copied by saving and loading it.",
    "no settings": "config must be a SyncConfig, got dict.\n"
    "  the settings of a wrapper or of attach\n"
    "  Write config=SyncConfig(**settings) for a dict of settings.",
    "no settings, attached": "config must be a SyncConfig, got str.\n"
    "  the settings of a wrapper or of attach\n"
    "  Write config=SyncConfig(...).",
    "devices": "device_ids can only be None or contain a single element, got [0, 1].\n"
    "  DistributedDataParallel(...)\n"
    "  Start one process per device, and move the module to its device before wrapping it.",
    "device on CPU": ONLY_ON_DEVICES.format("[device(type='cpu')]", "None", "['cpu']"),
    "devices without parameters": ONLY_ON_DEVICES.format("[0]", "0", "[]"),
    "mixed precision": "mixed_precision is private in torch, and not supported.\n"
    "  DistributedDataParallel(...)\n"
    "  Use torch.autocast around the forward; SyncConfig(wire=...) sends gradients in 16 bits.",
    "buffer hook": "_register_buffer_comm_hook is private in torch, and not supported.\n"
    "  DistributedDataParallel(...)\n"
    '  Set SyncConfig(buffers="off"), and change buffers in a hook of the module.',
    "other ranks": "_update_process_group is private in torch, and not supported.\n"
    "  DistributedDataParallel(...)\n"
    "  Wrap the module again, with the other group: the newest wrapper closes the older one.",
    "twice": "settings are given twice: bucket_cap_mb, buffers by arguments of torch's, and config.\n"
    "  DistributedDataParallel(...)\n"
    "  Put bucket_cap_mb, buffers into config=SyncConfig(...).",
    "unknown": "DistributedDataParallel has no argument 'wire'.\n"
    "  DistributedDataParallel(...)\n"
    "  Write settings of Undertow as config=SyncConfig(...). The other arguments have torch's names.",
    "ignore": "'3.weight' does not exist and cannot be ignored.\n  ignore, for a model of type Sequential\n"
    "  Did you mean '2.weight'?",
    "mesh": ONE_MESH,
    "mesh and group": MESH_OR_GROUP,
    "plan": "the saved plan is for another model.\n"
    "  it has 'layers.0.weight' (4, 4) float32 where the model has '0.weight' (8, 6) float32\n"
    "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    "size": SIZE.format("nan"),
    "no size in a list": SIZE.format("-2"),
}


@pytest.mark.slow
@in_ranks(2)
def test_arguments_that_cannot_work_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "dp"))
    with wrapped(Branches(1)) as ddp:
        plan = ddp.plan.to_json()
    sharded = nn.Linear(2, 2, bias=False)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh["dp"], [Shard(0)]))
    with_batch_norm = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    calls: dict[str, Callable[[], object]] = {
        "no group": lambda: attach(mlp(), process_group="world"),
        "group in second place": lambda: DistributedDataParallel(mlp(), dist.group.WORLD),
        "settings in second place": lambda: DistributedDataParallel(mlp(), SyncConfig()),  # type: ignore[arg-type]
        "no module": lambda: DistributedDataParallel([1]),
        "torch's wrapper": lambda: DistributedDataParallel(nn.parallel.DistributedDataParallel(mlp())),
        "two device types": lambda: DistributedDataParallel(with_last(lambda layer: layer.to("meta"))),
        "sync batch norm": lambda: DistributedDataParallel(with_batch_norm),
        "no shape": lambda: DistributedDataParallel(
            with_last(lambda layer: setattr(layer, "weight", nn.parameter.UninitializedParameter()))
        ),
        "sharded": lambda: DistributedDataParallel(sharded),
        "no values": lambda: attach(mlp().to("meta")),
        "sparse": lambda: DistributedDataParallel(
            with_last(lambda layer: setattr(layer, "weight", nn.Parameter(torch.eye(3).to_sparse())))
        ),
        "no leaf": lambda: DistributedDataParallel(with_last(lambda layer: layer._parameters.update(weight=2 * layer.weight))),
        "no settings": lambda: DistributedDataParallel(mlp(), config={"strategy": "zero1"}),
        "no settings, attached": lambda: attach(mlp(), config="zero1"),
        "devices": lambda: DistributedDataParallel(mlp(), [0, 1]),
        "device on CPU": lambda: DistributedDataParallel(mlp(), [torch.device("cpu")]),
        "devices without parameters": lambda: DistributedDataParallel(nn.Flatten(), [0], 0),
        "mixed precision": lambda: DistributedDataParallel(mlp(), mixed_precision="half"),
        "buffer hook": lambda: DistributedDataParallel(mlp())._register_buffer_comm_hook(None, print),
        "other ranks": lambda: DistributedDataParallel(mlp())._update_process_group(dist.group.WORLD),
        "twice": lambda: DistributedDataParallel(mlp(), bucket_cap_mb=1, forward_sync_buffers=False, config=SyncConfig()),
        "unknown": lambda: DistributedDataParallel(mlp(), wire="int8", cap=1),  # type: ignore[arg-type]
        "ignore": lambda: attach(mlp(), config=SyncConfig(ignore=("3.weight",))),
        "mesh": lambda: attach(mlp(), device_mesh=mesh),
        "mesh and group": lambda: attach(mlp(), device_mesh=mesh["dp"], process_group=dist.group.WORLD),
        "plan": lambda: attach(mlp(), config=SyncConfig(plan=plan)),
        "size": lambda: BucketedDDPHooks(mlp(), bucket_size_mb=float("nan")),
        "no size in a list": lambda: DistributedDataParallel(mlp(), bucket_cap_mb_list=[1, -2]),
    }
    for case, call in calls.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Flatten has no parameter")
            text = text_of(WrongType if case in ("no group", "no module") else ConfigError, call)
        assert text.replace(str(mesh), "MESH") == ARGUMENTS[case], case
    assert calls.keys() == ARGUMENTS.keys()
    destroy(mesh)


TORCHS_IGNORED = "ignored by torch's name"


@in_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "settings"),
    some(
        [
            ({}, {}),
            ({"bucket_cap_mb": 3, "forward_sync_buffers": False}, {"bucket_cap_mb": 3, "buffers": "off"}),
            ({"bucket_cap_mb": 3, "bucket_cap_mb_list": [1, 2]}, {"bucket_cap_mb": (1, 2)}),
            ({"bucket_cap_mb": 3, "bucket_cap_mb_list": []}, {"bucket_cap_mb": 3}),
            ({"forward_sync_buffers": True}, {}),
            ({"ignore": ["2.weight", "0.bias"]}, {"ignore": ("0.bias", "2.weight")}),
            ({TORCHS_IGNORED: ["2.bias"], "ignore": ["0.bias"]}, {"ignore": ("0.bias", "2.bias")}),
            (
                {"config": SyncConfig(overlap=False, ignore=("2.bias",)), "ignore": ["0"]},
                {"overlap": False, "ignore": ("0.bias", "0.weight", "2.bias")},
            ),
        ],
        most=3,
    ),
    ids=str,
)
def test_torchs_arguments_become_settings(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    model = mlp()
    if TORCHS_IGNORED in arguments:
        model._ddp_params_and_buffers_to_ignore = arguments.pop(TORCHS_IGNORED)
    with contextlib.closing(DistributedDataParallel(model, **arguments)) as ddp:
        assert (ddp.sync.config, ddp.parameters_to_ignore) == (SyncConfig(**settings), set(ddp.sync.config.ignore))
