"""Whether the installed packages are those that this project asks for."""

import platform
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from deployments.doctor.finding import Finding, fault, ok, warning

DISTRIBUTION = "lora-fleet"

NAMED = ("torch", "ray", "transformers")
"""Packages whose versions are shown each in a line; Triton's is with the devices, which may need none."""

REINSTALL = "install this project again (pip install -e ., or make setup)"


def version_findings() -> Iterator[Finding]:
    """Python, this project, and what it requires."""
    yield ok("python", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}")
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
        yield ok(DISTRIBUTION, metadata.version(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        yield fault(DISTRIBUTION, "not installed", REINSTALL)
        return
    yield from package_findings(requirements)


def package_findings(requirements: Iterable[str]) -> Iterator[Finding]:
    """One of each important package, one of each that is wrong, and one of all the others."""
    others = 0
    for requirement in map(Requirement, requirements):
        # Extras are for those who want them.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        finding = _package(requirement)
        if finding.remedy or requirement.name in NAMED:
            yield finding
        else:
            others += 1
    if others:
        yield ok("packages", f"{others} others, all as required")


def _package(requirement: Requirement) -> Finding:
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return fault(requirement.name, "not installed", REINSTALL)
    # torch tells what it was built for behind a plus, which no requirement speaks of.
    if requirement.specifier.contains(found, prereleases=True):
        return ok(requirement.name, found)
    text = f"{found}, where {requirement.specifier} is required"
    exact = any(one.operator == "==" for one in requirement.specifier)
    return fault(requirement.name, text, REINSTALL) if exact else warning(requirement.name, text, REINSTALL)
