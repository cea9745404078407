"""What `check.sh` asks about packages: which are missing, and which versions an installation is held to.

    packages.py missing        requirements of setup.py that this interpreter does not meet, one per line
    packages.py constraints    for pip: the versions of constraints.txt, but what is installed here stays as it is
    packages.py wanted         all requirements but torch, one per line
    packages.py pins VERSION   for pip: the versions of constraints.txt for that version of Python, without torch
    packages.py behind         lines of a .pth file through which a new environment sees what this one has

It runs before any package of the project is there, and so uses none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Optional

REPOSITORY = Path(__file__).resolve().parents[2]
_MARKER = re.compile(r'python_version >= "(\d+)\.(\d+)"')


def required() -> list[str]:
    """REQUIRED of setup.py."""
    for node in ast.parse((REPOSITORY / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REQUIRED":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise SystemExit("setup.py has no REQUIRED")


def name_of(requirement: str) -> str:
    return re.split(r"[=<>; ]", requirement, maxsplit=1)[0]


def installed(name: str) -> Optional[str]:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_met(requirement: str) -> bool:
    """`name` or `name>=version`."""
    name, _, least = requirement.partition(">=")
    found = installed(name)
    return found is not None and (not least or _numbers(found) >= _numbers(least))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


def pins(python: tuple[int, int]) -> Iterator[str]:
    """Lines of constraints.txt that hold for a version of Python, without their conditions."""
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        pin, _, condition = line.partition(";")
        if "==" not in pin or pin.startswith("#"):
            continue
        marker = _MARKER.search(condition)
        if marker is None or python >= (int(marker[1]), int(marker[2])):
            yield pin.strip()


def constraints() -> Iterator[str]:
    for pin in pins(sys.version_info[:2]):
        found = installed(name_of(pin))
        yield pin if found is None or not is_met(_wish(pin)) else f"{name_of(pin)}=={found}"


def _wish(pin: str) -> str:
    return next((each for each in required() if name_of(each) == name_of(pin)), name_of(pin))


def behind() -> Iterator[str]:
    # An environment made from one that is itself virtual would see the packages of the interpreter behind both.
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            yield f"import site; site.addsitedir({path!r})"


def main(arguments: list[str]) -> int:
    what, *rest = arguments
    if what == "pins":
        major, minor = map(int, rest[0].split("."))
        lines = [pin for pin in pins((major, minor)) if name_of(pin) != "torch"]
    elif what == "missing":
        lines = [each for each in required() if not is_met(each)]
    elif what == "wanted":
        lines = [each for each in required() if name_of(each) != "torch"]
    else:
        lines = list({"constraints": constraints, "behind": behind}[what]())
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
