# SPDX-License-Identifier: Apache-2.0
"""Section ``epp`` of the configuration: the endpoint picker behind a proxy."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from router.config_types import Port, Seconds

_File = Annotated[str, Meta(min_length=1)]


class EppTlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Certificates of the picker's gRPC port; files that change are read again."""

    cert_file: Annotated[
        _File | None, Meta(description="Certificate chain (PEM) of the ext_proc port; plain text if absent.")
    ] = None
    key_file: Annotated[_File | None, Meta(description="Its private key (PEM).")] = None
    client_ca_file: Annotated[
        _File | None,
        Meta(description="Certificates (PEM) that a proxy's own must be signed by; any proxy if absent."),
    ] = None


class EppConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The endpoint picker (``pointsman epp``)."""

    host: Annotated[str, Meta(min_length=1, description="Address that the gRPC ports listen on.")] = "0.0.0.0"
    grpc_port: Annotated[Port, Meta(description="Port of ext_proc; 0 takes a free one.")] = 9002
    health_port: Annotated[Port, Meta(description="Port of the gRPC health services.")] = 9003
    http_port: Annotated[Port, Meta(description="Port of `/metrics` and `/admin/`, on `server.host`.")] = 9090
    fallbacks: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Endpoints named behind the chosen one at most; 0 for proxies that take only one "
            "(Envoy's ORIGINAL_DST clusters).",
        ),
    ] = 2
    scores: Annotated[
        bool,
        Meta(
            description="Say in the metadata how each endpoint that was weighed compares: 1 / (1 + seconds of its "
            "plan), under `x-gateway-destination-endpoint-scores`."
        ),
    ] = False
    request_body_mode: Annotated[
        Literal["full_duplex_streamed", "buffered", "streamed", "none"],
        Meta(description="How request bodies come, where the proxy does not say."),
    ] = "full_duplex_streamed"
    response_body_mode: Annotated[
        Literal["full_duplex_streamed", "buffered", "streamed", "none"],
        Meta(description="The same of answers."),
    ] = "full_duplex_streamed"
    pool: Annotated[
        str, Meta(min_length=1, description="Name of the pool in the `inference_pool_*` metrics.")
    ] = "pointsman"
    drain_delay_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="After SIGTERM, how long streams are still taken while the health services say "
            "`NOT_SERVING`.",
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="How long open streams may then go on before they are cut.")
    ] = 30.0
    gateway_tests: Annotated[
        bool,
        Meta(
            description="Obey `test-epp-endpoint-selection` and answer `x-conformance-test-served-endpoint`, for "
            "conformance tests of gateways; lets clients choose endpoints."
        ),
    ] = False
    tls: EppTlsConfig = EppTlsConfig()
