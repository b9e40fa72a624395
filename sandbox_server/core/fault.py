"""Which fault a result has, given its reason and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox_server.core.execution import FAULT_OF, Fault, Reason

FAULT_BY_EVIDENCE: Mapping[Reason, Mapping[str, Fault]] = {
    Reason.TIMEOUT: {"starved": Fault.AMBIGUOUS},
    Reason.NO_OUTPUT_TIMEOUT: {"starved": Fault.AMBIGUOUS},
    Reason.OOM: {"ambiguous": Fault.AMBIGUOUS},
    Reason.RESOURCE_LIMIT: {"ambiguous": Fault.AMBIGUOUS},
    Reason.SANDBOX_LOST: {"own_work": Fault.POLICY, "ambiguous": Fault.AMBIGUOUS},
}
"""The entries of the evidence that change the fault of a reason. An entry counts if it is `true` or a non-empty object; the first that counts decides."""

_WAITING_REASONS = (Reason.TIMEOUT, Reason.NO_OUTPUT_TIMEOUT)
"""With these, a call whose evidence says `ran: false` only waited for the earlier calls of its session, for which it is not to blame."""


def fault_of_result(reason: Reason, metadata: Mapping[str, Any]) -> Fault:
    """Decide the fault of a result.

    Args:
        reason: how the call ended.
        metadata: the metadata of the result. Only `evidence` is read: a `fault` that an agent sends is ignored.
    """
    evidence = metadata.get("evidence")
    if isinstance(evidence, dict):
        for key, fault in FAULT_BY_EVIDENCE.get(reason, {}).items():
            proof = evidence.get(key)
            if proof is True or (isinstance(proof, dict) and proof):
                return fault
        if evidence.get("ran") is False and reason in _WAITING_REASONS:
            return Fault.AMBIGUOUS
    return FAULT_OF[reason]
