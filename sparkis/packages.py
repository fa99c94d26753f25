"""Checks that the packages sparkis is made of are its own.

Python looks packages up by name alone, and pip lets one distribution overwrite the files of another: PyPI has a
`resp-server`, whose package is called `resp_server` as well. Without this check such an environment fails somewhere
deep inside, with an error that names neither of the two.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The `__init__.py` of each says `DISTRIBUTION = "sparkis"`.
PACKAGES = ("state_backend", "resp_server", "spark_hooks")
DISTRIBUTION = "sparkis"


class PackageClashError(ImportError):
    """A package that Python found under one of sparkis' names is not sparkis' own."""


def check_packages() -> None:
    """Import the packages of sparkis; PackageClashError if one of them is another distribution's, or incomplete."""
    for name in PACKAGES:
        try:
            package = import_module(name)
        except Exception as error:  # another distribution's `__init__.py` may raise anything
            raise _clash(name, f"cannot be imported ({type(error).__name__}: {error})") from error
        if getattr(package, "DISTRIBUTION", None) != DISTRIBUTION:
            raise _clash(name, f"was found at {_place(package)} and is not sparkis' own")


def _place(package: ModuleType) -> str:
    return package.__file__ or ", ".join(package.__path__)


def _clash(name: str, what: str) -> PackageClashError:
    from importlib.metadata import packages_distributions  # takes long to import, and is needed here only

    others = sorted({each for each in packages_distributions().get(name, ()) if each.lower() != DISTRIBUTION})
    if others:
        advice = (
            f"The distribution {' and '.join(others)} has a package of that name, and one overwrote the other. "
            f"Keep one of them in this environment: pip uninstall {' '.join(others)}, then "
            f"pip install --force-reinstall --no-deps sparkis"
        )
    else:
        advice = (
            "No installed distribution but sparkis has a package of that name. If the place is not where sparkis is "
            "installed, rename that folder or file, or take it off PYTHONPATH; if it is, files of sparkis are missing: "
            "pip install --force-reinstall --no-deps sparkis"
        )
    return PackageClashError(f"sparkis cannot start: its package {name!r} {what}. {advice}")
