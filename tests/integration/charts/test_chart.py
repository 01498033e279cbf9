# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by the real helm in every documented mode: valid objects, and what they must say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from router.config import Config, load

from .conftest import CHART, EXAMPLES, Object, Render, Rendered

CRDS = Path(__file__).parent / "crds"
KUBERNETES = "1.37"
CUSTOM = {
    ("inference.networking.k8s.io/v1", "InferencePool"): "inferencepool.json",
    ("monitoring.coreos.com/v1", "ServiceMonitor"): "servicemonitor.json",
}
ROUTER_PAGE = (CHART.parents[1] / "router/README.md").read_text()


def validate(one: Object) -> None:
    """Built-in kinds strictly against the schemas of Kubernetes, others against their own."""
    schema = CUSTOM.get((one["apiVersion"], one["kind"]))
    if schema is not None:
        jsonschema.validate(one, json.loads((CRDS / schema).read_text()))
    else:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def load_settings(rendered: Rendered, tmp_path: Path, **environment: str) -> object:
    file = tmp_path / "pointsman.yaml"
    file.write_text(rendered.settings())
    return load(file, environ={"HOME": str(tmp_path), **environment})


@pytest.mark.parametrize("mode", ["gateway", "picker"])
def test_both_modes_render_valid_objects_out_of_the_box(render: Render, tmp_path: Path, mode: str) -> None:
    rendered = render({"mode": mode})
    for one in rendered.objects:
        validate(one)
    load_settings(rendered, tmp_path)
    kinds = {one["kind"] for one in rendered.objects}
    assert {"Deployment", "Service", "Role", "RoleBinding", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert ("InferencePool" in kinds) == (mode == "picker")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_renders_valid_objects_and_a_configuration_that_loads(
    render: Render, tmp_path: Path, file: Path
) -> None:
    rendered = render(None, file)
    for one in rendered.objects:
        validate(one)
    load_settings(rendered, tmp_path, CHAT_KEY="a-key-of-chat")


@pytest.mark.parametrize("mode", ["gateway", "picker"])
def test_several_processes_share_memory_that_is_theirs(render: Render, tmp_path: Path, mode: str) -> None:
    rendered = render({"mode": mode, "processes": 3, "sharedMemory": "2Gi"})
    for one in rendered.objects:
        validate(one)
    config = load_settings(rendered, tmp_path)
    assert isinstance(config, Config)
    assert (config.server.processes, config.server.shared_dir) == (3, "/run/pointsman")
    pod = rendered.of("Deployment")["spec"]["template"]["spec"]
    [volume] = [one for one in pod["volumes"] if one["name"] == "shared"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    (container,) = pod["containers"]
    assert {"name": "shared", "mountPath": "/run/pointsman"} in container["volumeMounts"]

    alone = render({"mode": mode})
    config = load_settings(alone, tmp_path)
    assert isinstance(config, Config)
    assert (config.server.processes, config.server.shared_dir) == (1, None)
    assert "/run/pointsman" not in json.dumps(alone.objects)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_renders_with_several_processes(render: Render, tmp_path: Path, file: Path) -> None:
    rendered = render({"processes": 2}, file)
    for one in rendered.objects:
        validate(one)
    load_settings(rendered, tmp_path, CHAT_KEY="a-key-of-chat")


def test_the_page_of_the_chart_names_every_example_and_every_value() -> None:
    page = (CHART / "README.md").read_text()
    assert [file.name for file in EXAMPLES if file.name not in page] == []
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [name for name in values if f"`{name}" not in page] == []


def test_every_value_is_in_the_schema_and_nothing_else(render: Render) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, value in values.items():
        properties = schema["properties"][name].get("properties")
        if properties is not None:
            assert set(value) == set(properties), name
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render({"replica": 3})
    assert "replica" in refused.value.stderr


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"mode": "proxy"}, "mode"),
        ({"fleet": {"ports": []}}, "ports"),
        ({"fleet": {"ports": list(range(8000, 8009))}}, "ports"),
        ({"fleet": {"ports": ["8000"]}}, "ports"),
        ({"fleet": {"eventsPort": 70000}}, "eventsPort"),
        ({"pool": {"failureMode": "Open"}}, "failureMode"),
        ({"networkPolicy": {"requestsFrom": "all"}}, "requestsFrom"),
        ({"processes": 0}, "processes"),
        ({"processes": "2"}, "processes"),
        ({"sharedMemory": "much"}, "sharedMemory"),
    ],
)
def test_values_that_are_not_accepted_are_refused(render: Render, values: Object, named: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(values)
    assert named in refused.value.stderr


def test_the_picker_listens_where_pool_and_probes_expect_it(render: Render) -> None:
    rendered = render(None, CHART / "examples/picker.yaml")
    service, pool = rendered.of("Service"), rendered.of("InferencePool")
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {
        "grpc": 9002,
        "grpc-health": 9003,
        "http": 9090,
    }
    assert pool["metadata"]["name"] == "llama"
    assert pool["spec"]["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": service["metadata"]["name"],
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
    (container,) = rendered.of("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "epp"
    assert container["livenessProbe"]["grpc"] == {"port": 9003, "service": "liveness"}
    assert container["readinessProbe"]["grpc"] == {"port": 9003, "service": "readiness"}
    settings = yaml.safe_load(rendered.settings())
    assert settings["fleet"]["kubernetes"]["pool"] == "llama"
    assert settings["epp"]["tls"]["cert_file"] == "/etc/pointsman/tls/tls.crt"


def test_the_service_selects_the_pods_that_the_deployment_makes(render: Render) -> None:
    for mode in ("gateway", "picker"):
        rendered = render({"mode": mode})
        labels = rendered.of("Deployment")["spec"]["template"]["metadata"]["labels"]
        for selector in (
            rendered.of("Service")["spec"]["selector"],
            rendered.of("Deployment")["spec"]["selector"]["matchLabels"],
            rendered.of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        ):
            assert selector.items() <= labels.items()


@pytest.mark.parametrize("mode", ["gateway", "picker"])
def test_the_service_account_may_only_read_what_is_read(render: Render, mode: str) -> None:
    rendered = render({"mode": mode})
    rules = {resource: rule for rule in rendered.of("Role")["rules"] for resource in rule["resources"]}
    read = {"pods", "inferencepools", "inferenceobjectives"} if mode == "picker" else {"pods"}
    assert set(rules) == read
    assert all(set(rule["verbs"]) == {"get", "list", "watch"} for rule in rules.values())
    assert not rendered.all("ClusterRole")


def ports_from(rule: Object) -> set[int]:
    """Ports of an ingress rule; empty for all ports."""
    return {
        number
        for port in rule.get("ports", ())
        for number in range(port["port"], port.get("endPort", port["port"]) + 1)
    }


def test_only_the_fleet_reaches_event_control_and_data_ports(render: Render) -> None:
    rendered = render(
        {"fleet": {"ports": [8000, 8001], "p2pPort": 5710, "extensionPort": 5720}},
        CHART / "examples/workers-stock.yaml",
    )
    policy = rendered.of("NetworkPolicy", "rel-pointsman-workers")["spec"]
    fleet = {"podSelector": {"matchLabels": {"app": "vllm"}}}
    router = {"podSelector": {"matchLabels": rendered.of("Service", "rel-pointsman")["spec"]["selector"]}}
    assert policy["podSelector"] == fleet["podSelector"]
    for rule in policy["ingress"]:
        if ports_from(rule) == {8000, 8001}:
            assert "from" not in rule
        elif rule["from"] == [router]:
            assert ports_from(rule) == {5557, 5558, 5657, 5658}
        else:
            assert rule == {"from": [fleet]}
    assert len(policy["ingress"]) == 3


def test_a_policy_names_who_may_send_requests(render: Render) -> None:
    rendered = render(None, CHART / "examples/picker.yaml")
    workers = rendered.of("NetworkPolicy", "rel-pointsman-workers")["spec"]["ingress"][0]
    assert len(workers["from"]) == 2
    requests = next(
        rule
        for rule in rendered.of("NetworkPolicy", "rel-pointsman")["spec"]["ingress"]
        if 9002 in ports_from(rule)
    )
    assert requests["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}
    ]


def test_what_is_configured_goes_before_what_the_chart_makes(render: Render, tmp_path: Path) -> None:
    mine = {
        "fleet": {"kubernetes": {"defaults": {"role": "both", "chunk_blocks": 4}}},
        "server": {"host": "::"},
    }
    rendered = render({"config": mine})
    settings = yaml.safe_load(rendered.settings())
    assert settings["server"] == {"host": "::", "port": 8080}
    assert settings["fleet"]["kubernetes"]["defaults"] == {
        "role": "both",
        "chunk_blocks": 4,
        "events_port": 5557,
        "replay_port": 5657,
    }
    before, after = (
        render({"config": {"plan": {"explore": share}}}).of("Deployment")["spec"]["template"]["metadata"][
            "annotations"
        ]["checksum/config"]
        for share in (0.1, 0.2)
    )
    assert before != after


def test_pods_run_without_rights_and_with_a_hash_key_that_is_one(render: Render) -> None:
    import base64

    rendered = render({"mode": "picker"})
    pod = rendered.of("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    secret = rendered.of("Secret", "rel-pointsman-hash-key")
    assert re.fullmatch(rb"[0-9a-f]{32}", base64.b64decode(secret["data"]["hash.key"]))


def test_what_exists_already_is_not_made_again(render: Render) -> None:
    rendered = render(None, CHART / "examples/minimal-rights.yaml")
    kinds = [one["kind"] for one in rendered.objects]
    assert not {"Secret", "Role", "RoleBinding", "ServiceAccount", "InferencePool"} & set(kinds)
    volumes = rendered.of("Deployment", "rel-pointsman")["spec"]["template"]["spec"]["volumes"]
    secrets = {one["secret"]["secretName"] for one in volumes if "secret" in one}
    assert secrets == {"picker-certificate", "pointsman-hash-key"}


@pytest.mark.parametrize("tier", ["stock", "extension"])
def test_the_example_s_workers_say_what_discovery_reads(render: Render, tier: str) -> None:
    rendered = render(None, CHART / f"examples/workers-{tier}.yaml")
    template = rendered.of("Deployment", "rel-pointsman-vllm")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    options = dict(word.removeprefix("--").split("=", 1) for word in container["args"] if "=" in word)
    events, transfer = json.loads(options["kv-events-config"]), json.loads(options["kv-transfer-config"])
    settings = yaml.safe_load(rendered.settings())["fleet"]["kubernetes"]
    assert events["endpoint"].endswith(f":{settings['defaults']['events_port']}")
    assert events["replay_endpoint"].endswith(f":{settings['defaults']['replay_port']}")
    (peers,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
    name, port = (
        ("p2p-port", peers["port"]) if tier == "stock" else ("extension-port", peers["control"]["port"])
    )
    assert template["metadata"]["annotations"][f"pointsman.io/{name}"] == str(port)
    selector = render(None, CHART / f"examples/workers-{tier}.yaml").of(
        "NetworkPolicy", "rel-pointsman-workers"
    )
    assert selector["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert options["port"] == "8000"


def test_the_dashboard_asks_only_for_metrics_that_there_are(render: Render) -> None:
    rendered = render({"dashboard": {"enabled": True}})
    dashboard = json.loads(rendered.of("ConfigMap", "rel-pointsman-dashboard")["data"]["pointsman.json"])
    asked = {
        name
        for panel in dashboard["panels"]
        for query in panel["targets"]
        for name in re.findall(r"\b((?:pointsman|inference)_[a-z_]+)", query["expr"])
    }
    picker = (CHART.parents[1] / "router/extproc/metrics.py").read_text()
    assert len(asked) > 20
    for name in asked:
        base = name.removesuffix("_bucket")
        if name.startswith("inference_pool_"):
            assert f'"{name.removeprefix("inference_pool_")}"' in picker, name
        else:
            assert f"| `{base}` |" in ROUTER_PAGE, name
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_helm_finds_nothing_wrong(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
