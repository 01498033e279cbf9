# SPDX-License-Identifier: Apache-2.0
"""Who a request is from, and the salt that keeps its cached blocks apart from everybody else's.

A salt is a keyed hash (BLAKE2b, RFC 7693, with the hash key of the deployment) of the tenant's name and of the salt
that the client sent, if any. So replicas agree on it, nobody outside can name another tenant's, and no choice of
a client's salt leads to another tenant's blocks. Keys are kept as keyed hashes only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from indexer.hashing import HashKey
from router.config_tenants import ANONYMOUS_NAME, TenantEntry, TenantsConfig
from router.errors import InvalidApiKey

_SALT_BYTES = 16
_KEY_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant, as requests carry it."""

    name: str
    weight: float = 1.0
    priority: int = 0
    """Of its requests, and the most that one may ask for; higher goes first."""
    max_in_flight: int | None = None
    salt_key: bytes | None = field(default=None, repr=False)
    """None: it shares prefixes, and clients' own salts go through unchanged."""

    def cache_salt(self, given: str | None) -> str | None:
        """What enters the block hashes of its requests: 32 hexadecimal digits, or what the client gave."""
        if self.salt_key is None:
            return given
        # The first byte tells "none" from every text.
        text = b"-" if given is None else b"+" + given.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self.salt_key, digest_size=_SALT_BYTES).hexdigest()


ANONYMOUS = Tenant(ANONYMOUS_NAME)


class Tenants:
    """The tenants of a deployment, by key. Look-ups are O(1)."""

    def __init__(self, config: TenantsConfig, hash_key: HashKey) -> None:
        self._secret = hash_key.secret
        self._required = config.require
        self._by_name = {entry.name: self._tenant(entry) for entry in config.entries}
        self._by_digest = {
            self._digest(key.encode()): self._by_name[entry.name]
            for entry in config.entries
            for key in entry.api_keys
        }
        self._anonymous = self._by_name.setdefault(ANONYMOUS_NAME, ANONYMOUS)

    def of_key(self, key: bytes | None) -> Tenant:
        """The tenant of a key; whoever has none, or an unknown one, is anonymous.

        Raises:
            InvalidApiKey: a key is required, and this is none.
        """
        known = self._by_digest.get(self._digest(key)) if key and self._by_digest else None
        if known is None and self._required:
            raise InvalidApiKey("a key that this service knows is needed, as a bearer token or x-api-key")
        return known or self._anonymous

    def get(self, name: str) -> Tenant | None:
        """A tenant by name; ``anonymous`` is always there."""
        return self._by_name.get(name)

    def _digest(self, key: bytes) -> bytes:
        """Looked up instead of compared, so time tells nothing about the keys there are."""
        return hashlib.blake2b(
            key, key=self._secret, person=b"pointsman key", digest_size=_KEY_DIGEST_BYTES
        ).digest()

    def _tenant(self, entry: TenantEntry) -> Tenant:
        salt_key = None
        if not entry.shared_prefix:
            salt_key = hashlib.blake2b(
                entry.name.encode(), key=self._secret, person=b"pointsman salt"
            ).digest()
        return Tenant(entry.name, entry.weight, entry.priority, entry.max_in_flight, salt_key)
