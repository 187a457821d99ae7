"""Results of a comparison with torch: checks, their differences, the verdict."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.reporting.certificate import write

AGREES, DEPARTS, LEFT_OUT = "agrees", "departs", "not compared"


@dataclasses.dataclass(frozen=True)
class Check:
    """Check of one claim.

    Attributes:
        name: the check's.
        claim: a sentence.
        differences: torch_bridge.comparison.Difference, in the order of the computation.
        notes: sentences.
        left_out: why nothing was compared, or "".
        own: torch's own error against another precision, from which the limit was set.
    """

    name: str
    claim: str
    differences: Sequence[Any] = ()
    notes: Sequence[str] = ()
    left_out: str = ""
    own: float | None = None  # torch's own error against another precision, from which the limit was set

    @property
    def first(self) -> Any:
        """Return the first difference above its limit, or None."""
        return next((found for found in self.differences if found.departs), None)

    @property
    def worst(self) -> Any:
        """Return the difference that is largest in relation to its limit, or None if there is none."""
        share = lambda found: found.size / found.limit if found.size == found.size else float("inf")
        return max(self.differences, key=share, default=None)

    @property
    def verdict(self) -> str:
        if self.left_out:
            return LEFT_OUT
        return AGREES if self.first is None else DEPARTS


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Result of all checks.

    Attributes:
        subject: facts on what was compared.
        checks: in order.
        curves: side -> losses of every update.
    """

    subject: Mapping[str, Any]
    checks: Sequence[Check]
    curves: Mapping[str, Sequence[float]]

    @property
    def agrees(self) -> bool:
        return all(check.first is None for check in self.checks)

    @property
    def first(self) -> tuple[Check, Any] | None:
        """Return the first check that fails and its first difference above the limit, or None."""
        return next(((check, check.first) for check in self.checks if check.first is not None), None)

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            size = (
                "" if check.worst is None or check.left_out else f"{check.worst.size:8.1e} of {check.worst.limit:.0e}"
            )
            lines.append(f"{check.verdict:13s}{size:18s} {check.claim}")
            lines += [f"{'':32s}{note}" for note in ([check.left_out] if check.left_out else check.notes)]
        return "\n".join([*lines, self.sentence])

    @property
    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        if self.first is None:
            count = sum(len(check.differences) for check in self.checks)
            return f"{self.subject['module']} in JAX equals torch in {count} comparisons"
        check, found = self.first
        where = f"the {found.kind} of {found.name} departs first: relative difference {found.size:.1e}"
        return f"{where}, accepted {found.limit:.0e} ({check.claim})"

    def write(self, folder: str) -> list:
        """Write certificate.html, a readable page, and certificate.json into a folder; return their paths."""
        return write(self.as_dict(), folder)

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate as plain values for JSON."""
        checks = [
            {
                "name": check.name,
                "claim": check.claim,
                "verdict": check.verdict,
                "reason": check.left_out,
                "notes": list(check.notes),
                "differences": [dataclasses.asdict(found) | {"departs": found.departs} for found in check.differences],
            }
            for check in self.checks
        ]
        head = {"agrees": self.agrees, "verdict": self.sentence, "subject": dict(self.subject)}
        return head | {"checks": checks, "curves": {name: list(values) for name, values in self.curves.items()}}
