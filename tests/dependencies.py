"""What kvq is built on: every requirement, met or not, with its licence. ``python -m tests.dependencies``.

Reads what is installed and asks nobody: known vulnerabilities need the network, for which `pip-audit` is the tool.
Exit code 1 when a requirement of kvq (or of one of its requirements) is not met.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def licence_of(package: Distribution) -> str:
    """The licence a package declares, in the newest of the three ways there are."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License :: ")]
    if classifiers:
        return " / ".join(c.rpartition(" :: ")[2] for c in classifiers)
    first_line = (metadata.get("License") or "").strip().partition("\n")[0]
    return first_line[:60] or "not declared"


def walk(root: str) -> tuple[dict[str, Distribution], list[str]]:
    """All that ``root`` requires here, itself included, and sentences about what is not met."""
    found: dict[str, Distribution] = {}
    unmet: list[str] = []
    waiting = [(Requirement(root), "you")]
    while waiting:
        requirement, wanted_by = waiting.pop()
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            unmet.append(f"{requirement} (wanted by {wanted_by}) is not installed")
            continue
        if not requirement.specifier.contains(package.version, prereleases=True):
            unmet.append(f"{requirement} (wanted by {wanted_by}) is installed as {package.version}")
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found[name] = package
        for text in package.requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append((needed, name))
    return found, unmet


def main() -> int:
    found, unmet = walk("kvq")
    for name, package in sorted(found.items()):
        print(f"{name:<28} {package.version:<16} {licence_of(package)}")
    for sentence in sorted(set(unmet)):
        print(f"NOT MET: {sentence}", file=sys.stderr)
    return 1 if unmet else 0


if __name__ == "__main__":
    sys.exit(main())
