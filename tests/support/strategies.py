"""Hypothesis strategies for values of the pure half."""

from functools import partial

from hypothesis import strategies as st

from undertow.plan import ParamSpec, Plan, SizeCaps, group_by_size, plan_from_groups
from undertow.schedule import lower_accumulation, lower_data_parallel

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "complex32": 4, "complex128": 16}


def spec(name: str, numel: int, *, dtype: str = "float32", device: str = "cpu", is_sparse: bool = False) -> ParamSpec:
    return ParamSpec(name=name, shape=(numel,), dtype=dtype, itemsize=ITEMSIZE[dtype], device=device, is_sparse=is_sparse)


def specs_of_sizes(*sizes: int) -> list[ParamSpec]:
    return [spec(f"p{i}", size, dtype="uint8") for i, size in enumerate(sizes)]


@st.composite
def param_lists(draw: st.DrawFn, *, min_size: int = 0) -> list[ParamSpec]:
    """Parameters of mixed dtypes and devices, some without elements, some sparse."""
    drawn = draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(["cpu", "cuda:0"]), st.booleans()),
            min_size=min_size,
            max_size=12,
        )
    )
    return [
        spec(f"p{i}", numel, dtype=dtype, device=device, is_sparse=is_sparse)
        for i, (numel, dtype, device, is_sparse) in enumerate(drawn)
    ]


_SIZES = st.integers(1, 400)
size_caps = st.builds(
    SizeCaps,
    cap_bytes=_SIZES,
    first_bytes=st.lists(_SIZES, max_size=3).map(tuple),
    last_bytes=st.lists(_SIZES, max_size=3).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    params = draw(param_lists())
    order, caps, num_ranks = draw(st.permutations(range(len(params)))), draw(size_caps), draw(st.integers(1, 9))
    return plan_from_groups(params, group_by_size(params, order, caps), num_ranks=num_ranks)


# Every way to lower a number of buckets.
LOWERINGS = [lower_data_parallel, partial(lower_data_parallel, overlap=False), lower_accumulation]
lowerings = st.sampled_from(LOWERINGS)
