# SPDX-License-Identifier: Apache-2.0
import functools

import msgspec
import pytest

from indexer.room import FEWEST_BLOCKS, MOST_BLOCKS
from router import config as configuration
from router.build import limits
from router.config import Config, load
from router.config_fleet import parse_worker_argument
from router.config_schema import reference_table, render_reference
from router.errors import ConfigError

HOME = {"HOME": "/home/someone"}


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "pointsman.yaml"
        file.write_text(text)
        return file

    return write


def refused(text="", environ=None):
    def check():
        configuration.validate(configuration.default(configuration.decode(text, environ or {}), HOME))

    with pytest.raises(ConfigError) as caught:
        check()
    return caught.value


def test_nothing_configured_gives_working_defaults():
    config = load(environ=HOME)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert config.index.hash_key_file == "/home/someone/.local/state/pointsman/hash.key"
    assert config.plan.policy == "kv_aware"
    assert config.fleet.workers == ()


def test_xdg_state_home_holds_the_hash_key_unless_it_is_relative():
    assert load(environ={"XDG_STATE_HOME": "/x", **HOME}).index.hash_key_file == "/x/pointsman/hash.key"
    assert load(environ={"XDG_STATE_HOME": "x", **HOME}).index.hash_key_file.startswith("/home/someone/")


def test_file_then_environment_then_arguments_win(write):
    file = write("gateway: {retries: 1, idle_timeout_s: 9}\nserver: {port: 1}\nplan: {min_pull_tokens: 7}\n")
    environ = {"POINTSMAN_GATEWAY__RETRIES": "3", "POINTSMAN_SERVER__PORT": "2", **HOME}
    config = load(file, environ, overrides={"server.port": 3})
    assert (config.plan.min_pull_tokens, config.gateway.retries, config.server.port) == (7, 3, 3)
    assert config.gateway.idle_timeout_s == 9.0


def every_key():
    return [row.key for row in reference_table(Config) if "[]" not in row.key]


def at(values, key):
    return functools.reduce(lambda inner, name: inner[name], key.split("."), values)


def test_value_outside_a_closed_set_names_the_set():
    error = refused(environ={"POINTSMAN_PLAN__POLICY": "fastest", **HOME})
    assert error.accepted == "one of kv_aware, round_robin, least_load"


def test_every_key_can_be_set_from_the_environment():
    values = {
        "fleet.workers": '[{url: "http://a:1", role: decode}]',
        "tokens.local": "[{model: m, path: /t}]",
        "costs.overrides": "{x: 2}",
        "index.backend": "reference",
        "index.max_blocks": "2048",
        "plan.policy": "least_load",
        "plan.backend": "reference",
        "plan.offload": "shared",
        "decisions.log.max_bytes": "2097152",
        "decisions.log.fsync": "always",
        "plan.explore": "0.5",
        "plan.slo_ttft_s": "2",
        "plan.slo_tpot_s": "0.1",
        "tenants.entries": "[{name: a, api_keys: [key-of-a]}]",
        "admission.max_in_flight_per_worker": "4",
        "fleet.kubernetes.selector": "{app: vllm}",
        "fleet.kubernetes.ports": "[8000]",
        "fleet.kubernetes.scheme": "https",
        "fleet.kubernetes.defaults.events_port": "5557",
        "fleet.kubernetes.defaults.replay_port": "5657",
        "fleet.kubernetes.defaults.p2p_port": "5710",
        "fleet.kubernetes.defaults.extension_port": "5720",
        "fleet.kubernetes.defaults.ranks": "2",
        "fleet.kubernetes.defaults.block_size_tokens": "32",
        "fleet.kubernetes.defaults.role": "decode",
        "fleet.kubernetes.defaults.transfer": "nixl",
        "index.peers": '["http://10.0.0.1:8080/admin/api"]',
        "epp.request_body_mode": "buffered",
        "epp.response_body_mode": "buffered",
    }
    for key in every_key():
        defaults = msgspec.to_builtins(load(environ=HOME))
        before = at(defaults, key)
        text = values.get(key)
        if text is None:
            text = (
                str(not before)
                if isinstance(before, bool)
                else "word"
                if isinstance(before, str | None)
                else "21"
            )
        if key == "fleet.backoff_max_s":
            text = "50"
        if key == "fleet.backoff_min_s":
            text = "2"
        if key == "gateway.max_body_bytes":
            text = "2048"
        environ = {"POINTSMAN_" + key.upper().replace(".", "__"): text, **HOME}
        if key == "fleet.kubernetes.selector":
            environ["POINTSMAN_FLEET__KUBERNETES__PORTS"] = "[8000]"
        if key == "tenants.require":
            environ["POINTSMAN_TENANTS__ENTRIES"] = values["tenants.entries"]
        after = at(msgspec.to_builtins(load(environ=environ)), key)
        assert after != before, key


def test_text_fields_take_digits_and_null_from_the_environment():
    assert load(environ={"POINTSMAN_ADMIN__TOKEN": "123", **HOME}).admin.token == "123"  # noqa: S105
    assert load(environ={"POINTSMAN_ADMIN__TOKEN": "null", **HOME}).admin.token is None
    assert load(environ={"POINTSMAN_COSTS__OVERRIDES__BW_PROMO": "1e9", **HOME}).costs.overrides == {
        "bw_promo": 1e9
    }


def test_variables_without_a_section_are_not_settings():
    load(environ={"POINTSMAN_REAL": "/x", "POINTSMAN_TRACES": "/y", **HOME})


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("gateway: {retries: many}", "gateway.retries", "many"),
        ("gateway: {retries: true}", "gateway.retries", True),
        ("gateway: {retires: 1}", "gateway.retires", 1),
        ("gatway: {}", "gatway", {}),
        ("gateway: 3", "gateway", 3),
        ("server: {port: 70000}", "server.port", 70000),
        ("server: {port: -1}", "server.port", -1),
        ("fleet: {poll_timeout_s: -1}", "fleet.poll_timeout_s", -1),
        ("fleet: {poll_timeout_s: 0}", "fleet.poll_timeout_s", 0),
        ("fleet: {poll_interval_s: .nan}", "fleet.poll_interval_s", None),
        ("fleet: {backoff_min_s: 40}", "fleet.backoff_max_s", 30.0),
        (
            "fleet: {workers: [{url: 'http://a:1', block_size_tokens: 1}]}",
            "fleet.workers[0].block_size_tokens",
            1,
        ),
        ("fleet: {workers: [{url: 'http://a:1', ranks: 0}]}", "fleet.workers[0].ranks", 0),
        ("fleet: {workers: [{url: 'http://a:1', role: boss}]}", "fleet.workers[0].role", "boss"),
        ("fleet: {workers: [{url: 'http://a:1'}, {url: 'http://a:1'}]}", "fleet.workers[1].id", "a:1"),
        ("fleet: {workers: [{id: x}]}", "fleet.workers[0].url", None),
        ("fleet: {workers: [{url: 'a:1'}]}", "fleet.workers[0].url", "a:1"),
        ("fleet: {workers: [{url: 'http://0.0.0.0:1'}]}", "fleet.workers[0].url", "http://0.0.0.0:1"),
        ("fleet: {workers: [{url: 'http://a:99999'}]}", "fleet.workers[0].url", "http://a:99999"),
        ("fleet: {workers: [{url: 'http://u:p@a:1'}]}", "fleet.workers[0].url", "http://u:p@a:1"),
        (
            "fleet: {workers: [{url: 'http://a:1', events: 'tcp://*:5'}]}",
            "fleet.workers[0].events",
            "tcp://*:5",
        ),
        ("fleet: {workers: [{url: 'http://a:1', p2p: '0.0.0.0:5'}]}", "fleet.workers[0].p2p", "0.0.0.0:5"),
        ("fleet: {workers: [{url: 'http://a:1', p2p: 'a'}]}", "fleet.workers[0].p2p", "a"),
        ("plan: {policy: magic}", "plan.policy", "magic"),
        ("tokens: {local: [{model: m, path: a}, {model: m, path: b}]}", "tokens.local[1].model", "m"),
        ("[1, 2]", "(file)", [1, 2]),
        ("server: {1: 2}", "server", 1),
    ],
)
def test_a_bad_value_names_its_field(text, field, value):
    error = refused(text)
    assert error.field == field
    if value is not None:
        assert error.value == value
    assert error.accepted


def test_an_unknown_key_lists_the_known_ones():
    assert "retries" in refused("gateway: {retires: 1}").accepted
    assert "gateway" in refused("gatway: {}").accepted


def test_text_that_is_no_yaml_and_a_missing_file_are_configuration_errors(tmp_path):
    assert refused("a: [").field == "(file)"
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.yaml", HOME)


def test_numbers_in_scientific_notation_are_numbers_and_repeated_keys_are_errors(write):
    file = write("costs: {overrides: {a: 1e9, b: -2.5E-3}}")
    assert load(file, HOME).costs.overrides == {"a": 1e9, "b": -2.5e-3}
    assert "retries" in refused("gateway: {retries: 1, retries: 2}").value


def test_unknown_and_malformed_variables_are_errors():
    assert refused(environ={"POINTSMAN_GATEWAY__NOPE": "1"}).field == "gateway.nope"
    assert refused(environ={"POINTSMAN_NOPE__X": "1"}).field == "nope.x"
    assert refused(environ={"POINTSMAN_GATEWAY__RETRIES": "[1"}).field == "gateway.retries"
    assert refused(environ={"POINTSMAN_GATEWAY__RETRIES": "x"}).value == "x"


def test_workers_are_named_after_their_address():
    values = configuration.default(configuration.decode("fleet: {workers: [{url: 'https://a/'}]}", {}), HOME)
    assert configuration.build(values).fleet.workers[0].id == "a:443"


def test_worker_argument_carries_every_option():
    worker = parse_worker_argument(
        "http://10.0.0.1:8000,events=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558,p2p=10.0.0.1:5710,"
        "ranks=2,role=prefill,chunk=4,block_size=32,id=w1"
    )
    assert (worker.id, worker.url, worker.ranks, worker.role) == ("w1", "http://10.0.0.1:8000", 2, "prefill")
    assert (worker.chunk_blocks, worker.block_size_tokens) == (4, 32)
    assert (worker.events, worker.replay) == ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert parse_worker_argument("http://[::1]:8000").id == "[::1]:8000"
    assert parse_worker_argument("http://a:1").ranks is None


@pytest.mark.parametrize(
    ("argument", "field"),
    [
        ("a:1", "--worker.url"),
        ("", "--worker.url"),
        ("http://a:1,ranks=x", "--worker.ranks"),
        ("http://a:1,ranks=0", "--worker.ranks"),
        ("http://a:1,events=5557", "--worker.events"),
        ("http://a:1,p2p=a:b", "--worker.p2p"),
        ("http://a:1,extension=0.0.0.0:5720", "--worker.extension"),
        ("http://a:1,color=red", "--worker"),
        ("http://a:1,ranks", "--worker"),
        ("http://a:1,role=both,role=both", "--worker.role"),
    ],
)
def test_a_bad_worker_argument_names_the_option(argument, field):
    with pytest.raises(ConfigError) as caught:
        parse_worker_argument(argument)
    assert caught.value.field == field


def test_arguments_replace_configured_workers(write):
    file = write("fleet: {workers: [{url: 'http://a:1'}]}")
    config = load(file, HOME, workers=[parse_worker_argument("http://b:2,ranks=2")])
    assert [(worker.id, worker.ranks) for worker in config.fleet.workers] == [("b:2", 2)]


def test_reference_describes_every_key():
    rows = reference_table(Config)
    assert all(row.doc and row.type for row in rows)
    assert "fleet.workers[].p2p" in {row.key for row in rows}
    assert "| `server.port` | integer | `8080` |" in render_reference(rows)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("index.max_blocks", "100"),
        ("index.max_blocks", "many"),
        ("index.offload_grace_s", "-1"),
        ("server.hung_after_s", "0"),
    ],
)
def test_bounds_of_the_index_and_of_processes_name_the_field_and_what_is_accepted(setting, value):
    variable = f"POINTSMAN_{setting.upper().replace('.', '__')}"
    error = refused(environ={variable: value, **HOME})
    assert (error.field, str(error.value)) == (setting, value)
    assert error.accepted


def test_the_index_is_bounded_by_what_is_configured_or_by_what_fits(tmp_path):
    assert limits(load(environ={"POINTSMAN_INDEX__MAX_BLOCKS": "2048", **HOME})).max_blocks == 2048
    assert FEWEST_BLOCKS <= limits(load(environ=HOME), tmp_path).max_blocks <= MOST_BLOCKS
