"""Steps that others have measured, half of which are kept out of the fit, and what the simulator makes of them.

Sources:

- github.com/HKBU-HPML/ddl-benchmarks, results of 2020-05-29: ResNet-50, BERT-Base and BERT-Large on 4 to 32 GPUs, four in a
  node, over three networks. A row of one fused message after backward ("BSP-A2A") gives the bandwidth of its model, network and
  number of GPUs. Rows of one message per tensor under backward ("WFBP-A2A") are predicted, and for ResNet-50 those of MG-WFBP,
  which joins a gradient with the next one if that comes before its own launch would be over. Rows of parameter servers, and of
  schedulers whose buckets are not published, are left out.
- github.com/NVIDIA/DeepLearningExamples, PyTorch: throughput of one GPU and of several in a node, FP32 and TF32. Rows of mixed
  precision are left out, because data loaders limit there. Sizes are of the architectures; even gradients are assumed, as are
  batches, for which the tables say nothing.

Per-tensor times of ResNet-50 are those of netx-repo/training-bottleneck; of BERT they follow from the architecture. That a third
of an iteration is forward is assumed.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

from support.project import ROOT
from undertow.lab.cost import Costs, Link, RingCosts, costs_for
from undertow.lab.profile import Profile
from undertow.lab.simulate import IDEAL, Conditions, simulate
from undertow.plan import ParamSpec, SizeCaps, group_by_size, plan_from_groups
from undertow.schedule import DDP

# Latency of one message, fitted to the rows that are not kept out, together with `undertow.lab.simulate.DEFAULTS`.
HOPS_US = {"10 GbE": 57.0, "100 Gb/s InfiniBand": 58.0, "100 GbE": 72.0}
_MIB = 1024 * 1024
_NUM_GPUS = (4, 8, 16, 32)
_BATCHES = {"ResNet-50": 64, "BERT-Base": 64, "BERT-Large": 8}
_ONE_GPU = {"ResNet-50": 253.1, "BERT-Base": 212.8, "BERT-Large": 49.0}  # samples per second, as all below
_BSP, _WFBP, _MG = "one message", "a message per tensor", "MG-WFBP"
_SAMPLES_PER_S = {
    ("ResNet-50", "10 GbE", _BSP): (925.02, 1282.28, 2485.12, 4920.82),
    ("ResNet-50", "10 GbE", _WFBP): (1015.4, 1795.74, 3146.78, 5113.18),
    ("ResNet-50", "10 GbE", _MG): (1003.18, 1980.58, 3784.98, 6883.6),
    ("BERT-Large", "10 GbE", _BSP): (53.04, 28.96, 54.3, 105.1),
    ("BERT-Large", "10 GbE", _WFBP): (56.04, 29.06, 53.42, 101.96),
    ("BERT-Base", "10 GbE", _BSP): (555.52, 518.94, 984.88, 1926.64),
    ("BERT-Base", "10 GbE", _WFBP): (634.1, 582.26, 1069.48, 2013.38),
    ("ResNet-50", "100 Gb/s InfiniBand", _BSP): (920.28, 1821.2, 3602.9, 7126.52),
    ("ResNet-50", "100 Gb/s InfiniBand", _WFBP): (1014.28, 2017.12, 3946.06, 7326.56),
    ("ResNet-50", "100 Gb/s InfiniBand", _MG): (1003.9, 2001.72, 3987.4, 7876.46),
    ("BERT-Large", "100 Gb/s InfiniBand", _BSP): (53.08, 99.18, 191.64, 375.22),
    ("BERT-Large", "100 Gb/s InfiniBand", _WFBP): (56.3, 101.68, 185.42, 339.82),
    ("BERT-Base", "100 Gb/s InfiniBand", _BSP): (555.7, 1082.42, 2112.96, 4184.38),
    ("BERT-Base", "100 Gb/s InfiniBand", _WFBP): (631.8, 1195.68, 2217.22, 4098.68),
    ("ResNet-50", "100 GbE", _BSP): (926.0, 1601.36, 3087.16, 5744.76),
    ("ResNet-50", "100 GbE", _WFBP): (1015.1, 1985.74, 3650.74, 6141.38),
    ("ResNet-50", "100 GbE", _MG): (1002.68, 1990.68, 3945.96, 7540.94),
    ("BERT-Large", "100 GbE", _BSP): (52.9, 55.8, 103.34, 187.0),
    ("BERT-Large", "100 GbE", _WFBP): (56.0, 54.82, 98.98, 174.78),
    ("BERT-Base", "100 GbE", _BSP): (555.36, 804.62, 1504.62, 2815.72),
    ("BERT-Base", "100 GbE", _WFBP): (632.58, 933.2, 1671.62, 2987.48),
}
# Model: MB of gradients; then system, link, samples per step, of one GPU per second, and of several.
_NODES = [
    ("ResNet-50", 102, "DGX A100", "nvlink3", 256, 938, {8: 7248}),
    ("ResNet-50", 102, "DGX-1 16GB", "nvlink2", 128, 367, {8: 2855}),
    ("ResNet-50", 102, "DGX-1 32GB", "nvlink2", 128, 356, {8: 2766}),
    ("ResNeXt101-32x4d", 177, "DGX A100", "nvlink3", 128, 456, {8: 3471}),
    ("ResNeXt101-32x4d", 177, "DGX-1 16GB", "nvlink2", 64, 147, {8: 1133}),
    ("ResNeXt101-32x4d", 177, "DGX-1 32GB", "nvlink2", 64, 144, {8: 1108}),
    ("SE-ResNeXt101-32x4d", 196, "DGX A100", "nvlink3", 128, 395, {8: 2991}),
    ("SE-ResNeXt101-32x4d", 196, "DGX-1 16GB", "nvlink2", 64, 132, {8: 1004}),
    ("SE-ResNeXt101-32x4d", 196, "DGX-1 32GB", "nvlink2", 64, 130, {8: 992}),
    ("Jasper, batch 32", 1331, "DGX A100", "nvlink3", 32, 42.18, {4: 157.49, 8: 310.10}),
    ("Jasper, batch 64", 1331, "DGX A100", "nvlink3", 64, 49.64, {4: 192.66, 8: 371.41}),
    ("Jasper, batch 16", 1331, "DGX-1 16GB", "nvlink2", 16, 10.71, {4: 40.28, 8: 78.23}),
    ("Jasper, batch 32", 1331, "DGX-1 32GB", "nvlink2", 32, 12.22, {4: 46.97, 8: 92.44}),
    ("Jasper, batch 32", 1331, "DGX-2", "nvlink2", 32, 13.46, {4: 51.38, 8: 100.54, 16: 188.14}),
    ("Transformer", 841, "DGX A100", "nvlink3", 10240, 51057, {4: 179245, 8: 347936}),
    ("Transformer", 841, "DGX-1 16GB", "nvlink2", 5120, 8742, {4: 30204, 8: 59316}),
    ("Transformer", 841, "DGX-2", "nvlink2", 10240, 9827, {4: 35216, 8: 68929, 16: 136253}),
    ("GNMT", 640, "DGX A100", "nvlink3", 6400, 83214, {4: 278576, 8: 519952}),
    ("GNMT", 640, "DGX-1 16GB", "nvlink2", 6400, 21860, {4: 80224, 8: 154168}),
    ("GNMT", 640, "DGX-2H", "nvlink2", 6400, 25583, {4: 91400, 8: 176616, 16: 351792}),
]
_NUM_TENSORS = 160


@dataclass(frozen=True)
class Row:
    model: str
    system: str
    method: str
    num_gpus: int
    measured_ms: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.system}, {self.method}, {self.num_gpus} GPUs"

    @property
    def is_kept_out(self) -> bool:
        """By a rule that nobody chooses: the first byte of the name's SHA-1 is odd."""
        return hashlib.sha1(self.name.encode()).digest()[0] % 2 == 1

    def predicted_ms(self, conditions: Conditions) -> float:
        return (_over_network if self.system in HOPS_US else _in_node)(self, conditions)


@cache
def rows() -> tuple[Row, ...]:
    networks = [
        Row(model, network, method, num_gpus, 1e3 * _BATCHES[model] * num_gpus / per_s)
        for (model, network, method), rates in _SAMPLES_PER_S.items()
        if method != _BSP
        for num_gpus, per_s in zip(_NUM_GPUS, rates, strict=True)
    ]
    nodes = [
        Row(model, system, "torch's buckets", num_gpus, 1e3 * samples * num_gpus / per_s)
        for model, _, system, _, samples, _, rates in _NODES
        for num_gpus, per_s in rates.items()
    ]
    return (*networks, *nodes)


@cache
def _profile(model: str) -> Profile:
    one_gpu_us = 1e6 * _BATCHES[model] / _ONE_GPU[model]
    if model != "ResNet-50":
        return _bert(model, *((768, 12) if model == "BERT-Base" else (1024, 24)), one_gpu_us=one_gpu_us)
    found = json.loads((ROOT / "benchmarks" / "shaped" / "workloads" / "resnet50.json").read_text(encoding="utf-8"))
    gaps_us = [gap_us for _, gap_us in found["tensors"]]
    scale = one_gpu_us / (sum(gaps_us) + found["forward_us"])
    return _of_sizes(
        model,
        [numel for numel, _ in found["tensors"]],
        [scale * sum(gaps_us[: at + 1]) for at in range(len(gaps_us))],
        forward_us=scale * found["forward_us"],
    )


def _bert(name: str, width: int, num_blocks: int, *, one_gpu_us: float) -> Profile:
    """Blocks are the work, evenly; the embeddings and the pooler have their gradients with the first and the last one."""
    embeddings = [30_522 * width, 512 * width, 2 * width, width, width]
    square = width * width
    attention = [square, width] * 4 + [width, width]
    feed_forward = [4 * square, 4 * width, 4 * square, width, width, width]
    numels = embeddings + (attention + feed_forward) * num_blocks + [square, width]
    num_in_blocks = len(attention + feed_forward) * num_blocks
    places = [min(max(index - len(embeddings), 0), num_in_blocks) for index in range(len(numels))]
    backward_us = one_gpu_us * 2 / 3
    ready_us = [backward_us * (1 - place / num_in_blocks) for place in places]
    return _of_sizes(name, numels[::-1], ready_us[::-1], forward_us=one_gpu_us - backward_us)


def _of_sizes(name: str, numels: Sequence[int], ready_us: Sequence[float], *, forward_us: float) -> Profile:
    """Tensors in the order of backward."""
    specs = [ParamSpec(name=f"p{at}", shape=(numel,), dtype="float32", itemsize=4) for at, numel in enumerate(numels)]
    return Profile(
        params=tuple(specs[::-1]), ready_us=tuple(ready_us[::-1]), forward_us=forward_us, backward_us=ready_us[-1], name=name
    )


def _over_network(row: Row, conditions: Conditions) -> float:
    profile, num = _profile(row.model), row.num_gpus
    costs = partial(_ring, row.system, num)
    plan = plan_from_groups(profile.params, [profile.order], num_ranks=num)
    alone = Conditions(
        **{name: getattr(conditions, name) for name in ("skew", "contention", "launch_us", "copy_us_per_mb")}, overlap=False
    )
    per_s = _SAMPLES_PER_S[row.model, row.system, _BSP][_NUM_GPUS.index(num)]
    wire_us = 1e6 * _BATCHES[row.model] * num / per_s - simulate(profile, plan, DDP, costs(math.inf), alone).step_us
    measured = costs(2 * (num - 1) / num * sum(spec.num_bytes for spec in profile.params) / (wire_us * 1e-6))
    groups = [[param] for param in profile.order] if row.method == _WFBP else _merged(profile, measured)
    plan = plan_from_groups(profile.params, groups, num_ranks=num)
    return simulate(profile, plan, DDP, measured, conditions).step_us / 1e3


def _ring(network: str, num_gpus: int, bytes_per_s: float) -> Costs:
    return RingCosts(Link(name=network, hop_s=HOPS_US[network] * 1e-6, bytes_per_s=bytes_per_s), num_ranks=num_gpus)


def _merged(profile: Profile, costs: Costs) -> list[list[int]]:
    launch_us, free_us, num_bytes = float(costs.collective_us("all_reduce", 0)), 0.0, 0
    groups: list[list[int]] = [[]]
    nexts = [*(profile.ready_us[param] for param in profile.order[1:]), math.inf]
    for param, next_us in zip(profile.order, nexts, strict=True):
        groups[-1].append(param)
        num_bytes += profile.params[param].num_bytes
        start_us = max(free_us, profile.ready_us[param])
        if next_us >= start_us + launch_us:
            free_us, num_bytes = start_us + float(costs.collective_us("all_reduce", num_bytes)), 0
            groups.append([])
    return [group for group in groups if group]


def _in_node(row: Row, conditions: Conditions) -> float:
    found = next(it for it in _NODES if (it[0], it[2]) == (row.model, row.system))
    _, megabytes, _, link, samples, per_s, _ = found
    backward_us, numel = 1e6 * samples / per_s * 2 / 3, int(megabytes * 1e6 / 4 / _NUM_TENSORS)
    ready_us = [backward_us * (at + 1) / _NUM_TENSORS for at in range(_NUM_TENSORS)]
    profile = _of_sizes(row.model, [numel] * _NUM_TENSORS, ready_us, forward_us=backward_us / 2)
    groups = group_by_size(profile.params, profile.order, SizeCaps(cap_bytes=25 * _MIB, first_bytes=(_MIB,)))
    plan = plan_from_groups(profile.params, groups, num_ranks=row.num_gpus)
    return simulate(profile, plan, DDP, costs_for(link, num_ranks=row.num_gpus), conditions).step_us / 1e3


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions."""

    errors: tuple[float, ...]

    @property
    def usual(self) -> float:
        return median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))


@cache
def errors(conditions: Conditions, *, is_kept_out: bool, in_nodes: bool | None = None) -> Errors:
    chosen = [
        row for row in rows() if row.is_kept_out is is_kept_out and (in_nodes is None or in_nodes is (row.system not in HOPS_US))
    ]
    return Errors(tuple(row.predicted_ms(conditions) / row.measured_ms - 1 for row in chosen))


def num_in_band(band: tuple[float, float]) -> tuple[int, int]:
    """Of the rows that are kept out: how many are in the band of their predictions, and how many there are."""
    found = errors(Conditions(), is_kept_out=True).errors
    return sum(band[0] <= 1 / (1 + error) <= band[1] for error in found), len(found)


def table() -> str:
    lines = [
        "| rows | kept out | rows | median error | worst | without defaults: median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, in_nodes in (("over networks", False), ("in a node, hidden", True), ("all", None)):
        for is_kept_out in (False, True):
            now = errors(Conditions(), is_kept_out=is_kept_out, in_nodes=in_nodes)
            ideal = errors(IDEAL, is_kept_out=is_kept_out, in_nodes=in_nodes)
            lines.append(
                f"| {title} | {'yes' if is_kept_out else 'no'} | {len(now.errors)} | {now.usual:.1%} | {now.worst:.1%} "
                f"| {ideal.usual:.1%} | {ideal.worst:.1%} |"
            )
    return "\n".join(lines) + "\n"


def worst() -> str:
    """The name of the row that was kept out of the fit and is predicted worst."""
    kept = [row for row in rows() if row.is_kept_out]
    return max(kept, key=lambda row: abs(row.predicted_ms(Conditions()) / row.measured_ms - 1)).name
