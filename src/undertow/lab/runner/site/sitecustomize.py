"""Redirects torch's DistributedDataParallel in a process that `undertow run` started. Python
imports this module by its name.

Launchers, data workers and scripts of other tools run it too, so it imports neither torch nor
Undertow: it waits until the program has imported torch, and Undertow is imported when the first
wrapper is made.
"""

import atexit
import functools
import importlib.util
import os
import sys

_MODULE = "torch.nn.parallel.distributed"
_REPLICATE = "._composable.replicate"  # the end of a module that needs the inside of torch's class


class _Finder:
    """Finds the module of torch's class like the other finders, and redirects the class after the
    module has run."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        spec.loader.exec_module = functools.partial(_run, spec.loader.exec_module)
        return spec


def _run(run, module):
    run(module)
    _redirect(module.DistributedDataParallel)


def _redirect(torchs):
    original = torchs.__init__

    # Also for subclasses, and for names that were bound before.
    def __new__(cls, *args, **kwargs):  # noqa: N807
        is_of_replicate = sys._getframe(1).f_globals.get("__name__", "").endswith(_REPLICATE)
        return object.__new__(cls if is_of_replicate else _replacing().class_for(cls))

    # For subclasses that call it by the name of the class.
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):  # noqa: N807
        (original if type(self) is torchs else _replacing().Wrapped.__init__)(self, *args, **kwargs)

    __new__.__wrapped__ = original  # the signature of the class
    torchs.__new__, torchs.__init__ = __new__, __init__


def _replacing():
    try:
        from undertow.lab.runner import replacing
    except ModuleNotFoundError as error:
        if error.name != "undertow":
            raise
        raise ImportError(
            "this program runs under `undertow run`, and its Python does not have Undertow.\n"
            f"  {sys.executable}\n"
            "  Install Undertow there, or start the program with a Python that has it."
        ) from error
    return replacing


def _import_the_next():
    """Imports the sitecustomize that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    own = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


def _say_if_nothing_was_wrapped(process, mark):
    if process != str(os.getpid()):  # a forked one
        return
    try:
        os.unlink(mark)
    except FileNotFoundError:
        if not hasattr(sys, "last_value"):  # an error that has ended the program says more
            print(
                "undertow run: no process of this program made a DistributedDataParallel: "
                "Undertow had nothing to do.",
                file=sys.stderr,
            )


def _begin():
    process, _, mark = os.environ.get("UNDERTOW_RUN_MARK", "").partition(":")
    if process == str(os.getpid()):
        atexit.register(_say_if_nothing_was_wrapped, process, mark)
    if _MODULE in sys.modules:  # something that Python imports even earlier needs torch
        _redirect(sys.modules[_MODULE].DistributedDataParallel)
    else:
        sys.meta_path.insert(0, _Finder)


if __name__ == "sitecustomize":
    if "UNDERTOW_RUN" in os.environ:
        _begin()
    _import_the_next()
