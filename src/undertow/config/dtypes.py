"""The spellings of a dtype in settings, and its one name."""

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(value: object) -> object:
    """Returns the long name of a dtype that is a torch.dtype or has a short name.

    Any other value as it is.
    """
    name = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return _SHORT_DTYPES.get(str(name), name)
