"""Makes the TLS certificate of one agent.

No authority signs it: the service compares it byte by byte with the certificate that the agent presents.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

# It is valid at any time, because changing the wall clock of a machine must not cut off sandboxes. The comparison is what authenticates the agent.
_VALID_FROM = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_VALID_UNTIL = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)
_MAX_NAME_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentCertificate:
    """A certificate and its private key, in PEM. The key is passed to the agent and kept nowhere else."""

    certificate: str
    key: str = field(repr=False)


def make_certificate(sandbox_id: str) -> AgentCertificate:
    """Make a certificate for the agent of one sandbox, signed by itself (ECDSA, P-256). Takes about a millisecond.

    Args:
        sandbox_id: the id of the sandbox, which becomes the common name of the certificate.
    """
    # Imported here because it takes a tenth of a second, which a service without such agents saves at its start.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, sandbox_id[:_MAX_NAME_LENGTH])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return AgentCertificate(certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(), key=private.decode())
