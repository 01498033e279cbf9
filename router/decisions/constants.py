# SPDX-License-Identifier: Apache-2.0
"""The constants that a decision was priced with, as rows of numbers, and costs made of such rows again. Pure.

A row has the numbers of a ``CostProfile`` in the order of ``NUMBERS``, a link row those of a ``Link``. Their names
are not repeated in every record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from router.costs.model import CERTAIN, CostModel, Costs, Doubts, Link
from router.costs.profile import NUMBERS, CostProfile

Row = tuple[float, ...]

_DIGITS = 7  # of constants, which are not known to three
_MOST_CACHED = 8192
_numbers = attrgetter(*NUMBERS)
_LINK_CONSTANTS = {
    "peer_connect_s": "connect_s",
    "peer_lookup_s": "lookup_s",
    "peer_bytes_per_s": "bytes_per_s",
    "peer_share_exponent": "share_exponent",
}


def _short_hash(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:8]


def layout_of(*structs: type[msgspec.Struct]) -> str:
    """Changes whenever the numbers of a row, the fields of the structs or their order do."""
    return _short_hash([NUMBERS, Link._fields, *(one.__struct_fields__ for one in structs)])


def constants_id(name: str, profile: CostProfile) -> str:
    """``name:hash`` of the constants that planning starts from: those of the profile, overrides included."""
    return f"{name}:{_short_hash([NUMBERS, _numbers(profile)])}"


class ConstantsRows:
    """Rows of live costs, kept as long as the costs keep their objects: making one costs more than looking it up."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._models: dict[CostModel, Row] = {}
        self._links: dict[Link, Row] = {}

    def of_worker(self, worker: str) -> Row:
        """The constants of a worker as they are now."""
        model = self._costs.model_for(worker)
        row = self._models.get(model)
        if row is None:
            if len(self._models) >= _MOST_CACHED:
                self._models.clear()
            row = self._models[model] = _rounded(_numbers(model.profile))
        return row

    def of_link(self, source: str, destination: str) -> Row:
        """The constants of pulls from ``source`` to ``destination`` as they are now."""
        link = self._costs.link(source, destination)
        row = self._links.get(link)
        if row is None:
            if len(self._links) >= _MOST_CACHED:
                self._links.clear()
            row = self._links[link] = _rounded(link)
        return row


NO_LINK = Link(0.0, 0.0, 1.0)
"""Of a question without sources."""


class AlikeCosts(NamedTuple):
    """Costs of a record whose workers and links are all alike."""

    model: CostModel
    pull: Link

    def model_for(self, worker: str) -> CostModel:
        return self.model

    def link(self, source: str, destination: str) -> Link:
        return self.pull

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return CERTAIN


class RecordedCosts:
    """Costs as a record has them: a model per worker, and per destination a link from each source."""

    def __init__(
        self,
        models: Mapping[str, CostModel],
        sources: Mapping[str, int],
        links: Mapping[str, Sequence[Link]],
    ) -> None:
        """``sources``: where the link from each stands in the ``links`` of a destination."""
        self._models = models
        self._sources = sources
        self._links = links

    def model_for(self, worker: str) -> CostModel:
        return self._models[worker]

    def link(self, source: str, destination: str) -> Link:
        return self._links[destination][self._sources[source]]

    def doubts(self, worker: str, source: str | None, peer_s: float) -> Doubts:
        return CERTAIN


class RowReader:
    """Models and links of rows, with single constants replaced; equal rows are read once."""

    def __init__(self, overrides: Mapping[str, float] | None = None) -> None:
        """``overrides``: names of ``NUMBERS`` to values."""
        self._overrides = dict(overrides or {})
        self._link_overrides = {
            field: value for name, value in self._overrides.items() if (field := _LINK_CONSTANTS.get(name))
        }
        self._models: dict[Row, CostModel] = {}
        self._links: dict[Row, Link] = {}

    def model(self, row: Row) -> CostModel:
        found = self._models.get(row)
        if found is None:
            if len(self._models) >= _MOST_CACHED:
                self._models.clear()
            found = self._models[row] = CostModel(_profile(row, self._overrides))
        return found

    def link(self, row: Row) -> Link:
        found = self._links.get(row)
        if found is None:
            if len(self._links) >= _MOST_CACHED:
                self._links.clear()
            found = self._links[row] = Link(*row)._replace(**self._link_overrides)
        return found


def _profile(row: Row, overrides: Mapping[str, float]) -> CostProfile:
    values = {**dict(zip(NUMBERS, row, strict=True)), **overrides}
    return msgspec.convert({"source": "decision log", **values}, CostProfile)


def _rounded(values: Sequence[float]) -> Row:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)
