# SPDX-License-Identifier: Apache-2.0
"""The handshake as a pure function of bytes: who may read from whom, decided before any block moves.

Both sides compare fingerprints, so neither has to trust the other's comparison. A session belongs to one
incarnation of the source, named by its boot id; a restarted source has another one, and a NIXL agent name that
contains it, so that nothing of the old incarnation can be mistaken for the new.
"""

from __future__ import annotations

from dataclasses import dataclass

from .agent import PeerOffer
from .errors import HandshakeRefusedError, RefusalReason
from .fingerprint import Fingerprint
from .messages import PROTOCOL_VERSION, Hello, Refusal, Welcome, decode, digest, encode

_SECRET = {RefusalReason.HASH_SEED, RefusalReason.TENANT}
_FIELDS = {
    RefusalReason.MODEL: "model",
    RefusalReason.WEIGHTS_REVISION: "weights_revision",
    RefusalReason.DTYPE: "dtype",
    RefusalReason.BLOCK_LENGTH: "block_length_bytes",
    RefusalReason.LAYOUT: "layout",
    RefusalReason.TP_MAP: "tp_map",
}


@dataclass(frozen=True, slots=True)
class Handshake:
    """One side's constants: who it is, what its blocks are, and what it offers to read."""

    fingerprint: Fingerprint
    offer: PeerOffer

    def hello(self, expected_boot_id: str | None = None) -> bytes:
        """The reader's opening; with `expected_boot_id` only that incarnation will do."""
        return encode(
            Hello(
                version=PROTOCOL_VERSION,
                boot_id=self.offer.boot_id,
                backends=self.offer.backends,
                fingerprint=self.fingerprint,
                expected_boot_id=expected_boot_id,
            )
        )

    def answer(self, data: bytes) -> tuple[bytes, HandshakeRefusedError | None]:
        """The source's answer to a Hello, and the refusal it stands for, if it is one. Never raises."""
        answers: str | None = None
        try:
            message = decode(data)
            if not isinstance(message, Hello):
                raise HandshakeRefusedError(RefusalReason.MALFORMED, "not a hello")
            answers = message.boot_id
            self._admit(message)
        except HandshakeRefusedError as refused:
            refusal = Refusal(
                version=PROTOCOL_VERSION,
                boot_id=self.offer.boot_id,
                answers=answers,
                reason=refused.reason,
                detail=refused.detail[:2000],
            )
            return encode(refusal), refused
        return encode(self._welcome(message.boot_id)), None

    def conclude(self, data: bytes, expected_boot_id: str | None = None) -> PeerOffer:
        """What the source's answer to our Hello lets us read.

        Raises:
            HandshakeRefusedError: by the peer (`by_peer`), or by us because its answer is not acceptable.
        """
        message = decode(data)
        if isinstance(message, Refusal):
            raise HandshakeRefusedError(message.reason, message.detail, by_peer=True)
        if not isinstance(message, Welcome):
            raise HandshakeRefusedError(RefusalReason.MALFORMED, "not an answer")
        if message.answers != self.offer.boot_id:
            raise HandshakeRefusedError(
                RefusalReason.MALFORMED, f"answers the hello of {message.answers}, not ours"
            )
        self._compare(message)
        if expected_boot_id not in (None, message.boot_id):
            raise HandshakeRefusedError(
                RefusalReason.STALE_BOOT, f"{expected_boot_id} was expected, {message.boot_id} answers"
            )
        if message.region.block_bytes != self.fingerprint.block_length_bytes:
            raise HandshakeRefusedError(
                RefusalReason.BLOCK_LENGTH, f"its region has blocks of {message.region.block_bytes} bytes"
            )
        if digest(message.metadata) != message.metadata_digest:
            raise HandshakeRefusedError(RefusalReason.DAMAGED_METADATA, "its digest does not fit")
        return PeerOffer(
            boot_id=message.boot_id,
            agent_name=message.agent_name,
            metadata=message.metadata,
            region=message.region,
            backends=message.backends,
        )

    def _admit(self, hello: Hello) -> None:
        self._compare(hello)
        if hello.expected_boot_id not in (None, self.offer.boot_id):
            raise HandshakeRefusedError(
                RefusalReason.STALE_BOOT, f"{hello.expected_boot_id} is gone; this is {self.offer.boot_id}"
            )

    def _compare(self, theirs: Hello | Welcome) -> None:
        if theirs.boot_id == self.offer.boot_id:
            raise HandshakeRefusedError(RefusalReason.SELF, "both sides are the same incarnation")
        if not set(theirs.backends) & set(self.offer.backends):
            raise HandshakeRefusedError(
                RefusalReason.BACKEND,
                f"{list(theirs.backends)} has nothing of {list(self.offer.backends)}",
            )
        differing = self.fingerprint.differences(theirs.fingerprint)
        if differing:
            words = "; ".join(self._difference(reason, theirs.fingerprint) for reason in differing)
            raise HandshakeRefusedError(differing[0], words)

    def _difference(self, reason: RefusalReason, theirs: Fingerprint) -> str:
        if reason in _SECRET:
            return f"{reason.value} differs"
        name = _FIELDS[reason]
        return f"{reason.value} is {getattr(theirs, name)!r}, here {getattr(self.fingerprint, name)!r}"

    def _welcome(self, answers: str) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            boot_id=self.offer.boot_id,
            answers=answers,
            backends=self.offer.backends,
            fingerprint=self.fingerprint,
            agent_name=self.offer.agent_name,
            region=self.offer.region,
            metadata=self.offer.metadata,
            metadata_digest=digest(self.offer.metadata),
        )
