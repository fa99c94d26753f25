"""The check that the packages of sparkis are not those of another distribution.

Python finds packages by name alone, and pip lets a distribution overwrite the files of another. For example, PyPI has a
`resp-server`, which also has a package `resp_server`. Without this check, sparkis would fail later, with an error that
names neither distribution. The programs (`resp_server.programs`) and Spark's Python workers (`spark_hooks`) import
`sparkis` only to raise this error.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The `__init__.py` of each of them sets `DISTRIBUTION = "sparkis"`.
PACKAGES = ("state_backend", "resp_server", "spark_hooks")
DISTRIBUTION = "sparkis"


class PackageClashError(ImportError):
    """Python found a package of another distribution under the name of a package of sparkis."""


def check_packages() -> None:
    """Import the packages of sparkis; PackageClashError if one belongs to another distribution, or is incomplete."""
    for name in PACKAGES:
        try:
            package = import_module(name)
        except Exception as error:  # another distribution's `__init__.py` may raise anything
            raise _clash(name, f"cannot be imported ({type(error).__name__}: {error})") from error
        if getattr(package, "DISTRIBUTION", None) != DISTRIBUTION:
            raise _clash(name, f"was found at {_location(package)} and is not sparkis' own")


def _location(package: ModuleType) -> str:
    return package.__file__ or ", ".join(package.__path__)


def _clash(name: str, problem: str) -> PackageClashError:
    from importlib.metadata import packages_distributions  # imported here, because the import is slow

    others = sorted({each for each in packages_distributions().get(name, ()) if each.lower() != DISTRIBUTION})
    if others:
        advice = (
            f"The distribution {' and '.join(others)} has a package of that name, and one overwrote the other. "
            f"Keep one of them in this environment: pip uninstall {' '.join(others)}, then "
            f"pip install --force-reinstall --no-deps sparkis"
        )
    else:
        advice = (
            "No installed distribution but sparkis has a package of that name. If sparkis is installed elsewhere, "
            "rename that folder or file, or remove it from PYTHONPATH. Otherwise files of sparkis are missing: "
            "pip install --force-reinstall --no-deps sparkis"
        )
    return PackageClashError(f"sparkis cannot start: its package {name!r} {problem}. {advice}")
