"""A certificate for one agent. It vouches for nobody but itself: the service compares it byte by byte with what the agent shows."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

# Pinned, not checked against a clock: a wall clock that is set must not end sandboxes.
_FROM = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_UNTIL = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentCertificate:
    """A certificate and its private key, in PEM. The key goes to the agent and is kept nowhere else."""

    certificate: str
    key: str = field(repr=False)


def make_certificate(sandbox_id: str) -> AgentCertificate:
    """Make a certificate for the agent of one sandbox, signed by itself (ECDSA, P-256). Takes about a millisecond.

    Args:
        sandbox_id: whose; it is the name in the certificate.
    """
    # Here and not above: a tenth of a second that a service without such agents need not spend at its start.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, sandbox_id[:_LONGEST_NAME])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return AgentCertificate(certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(), key=private.decode())
