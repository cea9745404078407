"""The Python that runs programs: the one of this process, fresh, without `site`, with the installed packages."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import NamedTuple

from zbgrpo.errors import ConfigError

READY_FD = 3
"""Where a started program writes `READY`, before any of it runs, and closes it."""
INPUT_FD = 5
"""Where its standard input comes in. It is 0 only in the program itself: what starts programs in a namespace of their
own keeps its own 0 open, where the program could read its input anew."""
READY = b"+"

_THREAD_STACK_BYTES = 8 * 1024**2

# The names it uses are deleted: a program that forgets its `import sys` must fail. The stack size of threads would
# otherwise be that of the main thread, and a few threads would fill the address space.
_BOOTSTRAP = """\
import builtins, posix, sys, _thread
builtins.exit = builtins.quit = sys.exit
posix.write({ready_fd}, {ready!r})
posix.close({ready_fd})
posix.dup2({input_fd}, 0)
posix.close({input_fd})
_thread.stack_size({thread_stack_bytes})
sys.path += {packages!r}
sys.argv = ["program.py"]
del builtins, posix, sys, _thread
__file__ = {program!r}
exec(compile(open(__file__, "rb").read(), __file__, "exec", dont_inherit=True))
"""

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")

_SYSTEM_PATHS = (
    "/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/local/lib",
    "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin",
    "/usr/share/zoneinfo", "/usr/share/locale", "/etc/localtime", "/etc/ld.so.cache",
)  # fmt: skip
"""Programs and libraries of the system."""


class Interpreter(NamedTuple):
    """What it takes to start it."""

    executable: str
    packages: tuple[str, ...]
    """Folders of installed packages; their .pth files are not read."""
    paths: tuple[str, ...]
    """Folders and files that have to be readable for it, the system's own among them. None lies beneath another."""
    library_path: str
    """Where its libpython is, if it has one."""

    def command(self, program: str) -> list[str]:
        """Arguments that run the file `program`."""
        bootstrap = _BOOTSTRAP.format(
            ready_fd=READY_FD,
            input_fd=INPUT_FD,
            ready=READY,
            thread_stack_bytes=_THREAD_STACK_BYTES,
            packages=list(self.packages),
            program=program,
        )
        return [self.executable, "-I", "-S", "-B", "-X", "utf8", "-c", bootstrap]

    def variables(self, home: str) -> dict[str, str]:
        """All its environment variables: nothing of this process's."""
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            # Each arena and each thread of a numerical library reserves address space, of which there is a limit.
            "MALLOC_ARENA_MAX": "2",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "NUMEXPR_NUM_THREADS": "1",
        }
        if self.library_path:
            variables["LD_LIBRARY_PATH"] = self.library_path
        return variables


def this_interpreter() -> Interpreter:
    """That of this process. `ConfigError` if it does not know where it lies."""
    if not sys.executable:
        raise ConfigError("programs cannot be run: this process does not know its own interpreter (sys.executable)")
    executable = os.path.realpath(sys.executable)
    packages = _package_folders()
    library_path = _library_path()
    own = [executable, sys.base_prefix, sys.base_exec_prefix, *packages, *filter(None, [library_path])]
    if os.path.realpath(sys.base_prefix) == "/usr":  # the system's Python: the folders of the system are enough
        own = [path for path in own if os.path.realpath(path) != "/usr"]
    paths = outermost([*_SYSTEM_PATHS, *(os.path.realpath(path) for path in own)])
    return Interpreter(
        executable=executable,
        packages=packages,
        paths=outermost([*paths, *_loaded_library_folders(paths)]),
        library_path=library_path,
    )


def outermost(paths: list[str]) -> tuple[str, ...]:
    """Those that exist and do not lie beneath another one, in order."""
    kept = dict.fromkeys(path for path in paths if os.path.exists(path))
    return tuple(path for path in kept if not any(path != other and is_beneath(path, other) for other in kept))


def is_beneath(path: str, folder: str) -> bool:
    """Whether an absolute path is the folder or lies beneath it, by name."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _package_folders() -> tuple[str, ...]:
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    installed += [entry for entry in sys.path if os.path.basename(entry.rstrip("/")) in _PACKAGE_FOLDERS]
    return tuple(dict.fromkeys(os.path.realpath(path) for path in installed if os.path.isdir(path)))


def _library_path() -> str:
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return ""
    folder = sysconfig.get_config_var("LIBDIR")
    return os.path.realpath(folder) if isinstance(folder, str) and os.path.isdir(folder) else ""


def _loaded_library_folders(known: tuple[str, ...]) -> list[str]:
    """Folders outside the known ones from which this process has loaded shared libraries.

    Where every package has a prefix of its own (Nix, Spack, module systems), the interpreter's libraries lie there.
    """
    folders = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if ".so" in os.path.basename(path) and not any(is_beneath("/" + path, folder) for folder in known):
                folders.add(os.path.dirname("/" + path))
    return sorted(folders)
