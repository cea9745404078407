"""Packaging of zbgrpo. What is tested together is pinned in constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

REQUIRED = [
    "torch",
    "transformers>=4.51",
    "safetensors",
    "numpy",
    "msgspec",
    "pyzmq",
    "isal>=1.6.1",
    "pyyaml",
    "rich",
    "math-verify",
]

EXTRAS = {
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "parquet": ["pyarrow"],
}
EXTRAS["dev"] = [
    *EXTRAS["tensorboard"],
    *EXTRAS["wandb"],
    *EXTRAS["parquet"],
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ruff",
    "mypy",
    "types-PyYAML",
]


def _version() -> str:
    text = (HERE / "zbgrpo" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("zbgrpo/__init__.py has no __version__")
    return found[1]


setup(
    name="zbgrpo",
    version=_version(),
    description="GRPO and DAPO on verifiable rewards, without Ray: generation and training overlap in one torchrun job",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="zbgrpo authors",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["zbgrpo", "zbgrpo.*"]),
    package_data={"zbgrpo": ["py.typed"], "zbgrpo.observe.report": ["assets/*"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["zbgrpo = zbgrpo.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
