"""An interpreter that has torch already: `python()` is its path, for commands that would import torch for seconds.

The executable asks a server to fork. It hands over its arguments, environment, folder, namespaces and open files, passes on
signals, and ends as the forked process does. What such a process starts by `sys.executable`, as torchrun and multiprocessing
start ranks, is forked too. The first call starts the server, which ends with the tests. At the end of a process its `atexit`
functions run, but modules are not taken apart: tests of that, and of the first imports, need an interpreter of their own.
"""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_FOLDER, _FILE = "WARM_PYTHONS", os.path.abspath(__file__)
_HIGH = 500  # the first number of descriptors that are on their way to their own numbers
_MOST = 250  # descriptors in one message
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCONT)
_PR_SET_PDEATHSIG = 1
_EXECUTABLE = '#!/bin/sh\nexec "{python}" -IS "{file}" "$0" "$@"\n'


def python(*modules: str) -> str:
    """The path of the executable; its processes have these modules too, if they are installed."""
    if _FOLDER not in os.environ:
        return sys.executable  # there are no tests that a server would end with
    path = os.path.join(os.environ[_FOLDER], "-".join(("python", *modules)))
    if not os.path.exists(path):
        part = f"{path}.{os.getpid()}"
        with open(part, "w", encoding="utf-8") as file:
            file.write(_EXECUTABLE.format(python=sys.executable, file=_FILE))
        os.chmod(part, 0o755)
        os.replace(part, path)
    return path


def start_new_interpreters() -> None:
    """Makes `sys.executable` of a process that was forked itself a new interpreter again."""
    if _FOLDER in os.environ and sys.executable.startswith(os.environ[_FOLDER]):
        sys.executable = _interpreter(sys.executable)


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """They are shared by this process and those that it starts, and end with it."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        os.environ[_FOLDER] = folder
        with open(os.path.join(folder, "owner"), "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        yield


# The executable, which imports little.


def _interpreter(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().split('"')[1]


def _call(path: str, arguments: list[str]) -> NoReturn:
    import marshal

    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    server = _connection(path)
    for each in _PASSED_ON:
        signal.signal(each, lambda number, _frame: server.send(bytes([number])))
    wanted = marshal.dumps((path, arguments, os.getcwd(), dict(os.environ), numbers, os.getpid(), os.getppid()))
    socket.send_fds(server, [len(wanted).to_bytes(8, "little")], numbers)
    server.sendall(wanted)
    os.closerange(3, server.fileno())
    os.closerange(server.fileno() + 1, _HIGH)
    ended = server.recv(4)
    status = int.from_bytes(ended, "little") if ended else signal.SIGKILL  # the server is gone
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    _be_killed(os.WTERMSIG(status))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _be_killed(number: int) -> NoReturn:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("the process has ended")


def _connection(path: str) -> socket.socket:
    import fcntl

    with contextlib.suppress(FileNotFoundError):
        return _connected(path)
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            return _connected(path)
        _start_server(path)
        return _connected(path)


def _connected(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{path}.socket")
    return server


def _start_server(path: str) -> None:
    import subprocess

    left = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNDERTOW", "TORCH"))}
    if "PYTHONPATH" in os.environ:  # where the library may be
        left["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with open(f"{path}.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [_interpreter(path), _FILE, "serve", path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**left, "OMP_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        server.stdout.read()  # it closes it when it listens


# The server, and what it forks.


def _serve(path: str) -> NoReturn:
    import gc

    del sys.path[0]  # this file's folder
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background would ignore it
    _import(os.path.basename(path).split("-")[1:])
    gc.collect()
    gc.freeze()
    _Server(path).run()


def _import(modules: list[str]) -> None:
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch", "torch._dynamo", "torch.distributed.launcher", "torch.distributed.checkpoint", "undertow"):
            importlib.import_module(name)
        exec("from undertow import *", {})  # each name brings its modules
        for name in modules:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)


class _Server:
    def __init__(self, path: str) -> None:
        import selectors

        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.part")
        self._listener.listen(64)
        os.rename(f"{path}.part", f"{path}.socket")
        os.dup2(2, 1)
        with open(os.path.join(os.path.dirname(path), "owner"), encoding="utf-8") as file:
            owner = os.pidfd_open(int(file.read()))
        self._watch(owner, lambda: os._exit(0))  # the kernel ends what was forked
        self._watch(self._listener, self._begin)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():  # one before it may have ended it
                    key.data()

    def _watch(self, file: Any, then: Callable[[], None]) -> None:
        self._selector.register(file, 1, then)

    def _begin(self) -> None:
        import marshal

        asks, _ = self._listener.accept()
        size, descriptors, _, _ = socket.recv_fds(asks, 8, _MOST)
        wanted = asks.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if not wanted:  # it was killed
            asks.close()
            return
        process = os.fork()
        if process == 0:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            asks.close()
            _end_after(lambda: _become(descriptors, *marshal.loads(wanted)))
        for descriptor in descriptors:
            os.close(descriptor)
        ended = os.pidfd_open(process)
        self._watch(ended, lambda: self._end(process, ended, asks))
        self._watch(asks, lambda: self._pass_on(process, asks))

    def _end(self, process: int, ended: int, asks: socket.socket) -> None:
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(OSError):
            asks.send(status.to_bytes(4, "little"))
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):
            self._selector.unregister(asks)
        asks.close()

    def _pass_on(self, process: int, asks: socket.socket) -> None:
        with contextlib.suppress(ConnectionResetError):
            if numbers := asks.recv(16):
                for number in numbers:
                    os.kill(process, number)
                return
        self._selector.unregister(asks)
        os.kill(process, signal.SIGKILL)  # as the executable was


def _end_after(run: Callable[[], None]) -> NoReturn:
    import atexit
    import threading

    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code != end.code and end.code is not None:
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code = -1 if isinstance(error, KeyboardInterrupt) else 1
        trace = error.__traceback__
        while trace.tb_next is not None and trace.tb_frame.f_code.co_filename == _FILE:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -1:
        _be_killed(signal.SIGINT)
    os._exit(code & 0xFF)


def _become(  # noqa: PLR0913  # all that a process inherits
    descriptors: list[int],
    path: str,
    arguments: list[str],
    folder: str,
    variables: dict[str, str],
    numbers: list[int],
    asks: int,
    parent: int,
) -> None:
    import ctypes
    import multiprocessing

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for kind in ("uts", "net", "mnt"):
        if os.readlink(theirs := f"/proc/{asks}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            libc.setns(os.open(theirs, os.O_RDONLY), 0)
    _open_as(descriptors, numbers)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    os.getppid = lambda: parent  # programs look whether who started them is there
    sys.executable, sys.orig_argv = path, [path, *arguments]
    multiprocessing.set_executable(path)
    if "PYTHONUNBUFFERED" in variables:
        sys.stdout.reconfigure(write_through=True)
    _run(arguments, folder, [it for it in variables.get("PYTHONPATH", "").split(os.pathsep) if it])


def _open_as(descriptors: list[int], numbers: list[int]) -> None:
    import fcntl

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    os.closerange(3, _HIGH)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(_HIGH, _HIGH + _MOST)


def _run(arguments: list[str], folder: str, paths: list[str]) -> None:
    import importlib
    import runpy
    import warnings
    from types import ModuleType

    while (option := arguments.pop(0)) in ("-u", "-B", "-W"):
        if option == "-W":
            sys.warnoptions.append(arguments.pop(0))
            warnings._processoptions(sys.warnoptions[-1:])
    first = {"-c": "", "-m": folder}.get(option, os.path.dirname(os.path.realpath(option)))
    sys.path[:0] = [first, *paths]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if any(os.path.exists(os.path.join(it, "sitecustomize.py")) for it in paths):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if option == "-m":
        sys.argv = ["-m", *arguments[1:]]
        runpy._run_module_as_main(arguments[0])
    elif option == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [option, *arguments]
        main.__file__ = option
        with open(option, encoding="utf-8") as file:
            exec(compile(file.read(), option, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    _call(sys.argv[1], sys.argv[2:])
