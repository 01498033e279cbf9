# SPDX-License-Identifier: Apache-2.0
"""Properties of the tree as a whole: import layers, what the wheel contains, what the documents promise."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("router", "indexer", "engine_ext", "gpu_ops")
ENGINE_LIBRARIES = {"torch", "vllm", "nixl", "triton"}
ENGINE_LIBRARY_PLACES = (
    "engine_ext/vllm/",
    "engine_ext/transfer/",
    "gpu_ops/",
    "tests/real/",
    "tests/golden/",  # recorders, which run in the engine's own venv
    "tests/gpu/kernels/",  # run in a venv with torch by tests/gpu/test_kernels.py
    "tests/bench/gpu_ops.py",
    "tests/bench/eviction.py",
)
SIMULATOR_USERS = ("router/replay/", "router/demo", "router/cli")
LICENSED_SUFFIXES = {".py", ".pyi", ".sh", ".c", ".cpp", ".h", ".hpp"}
SPDX = re.compile(r"^(#|//) SPDX-License-Identifier: Apache-2\.0$")
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIGURATION_MARK = "# pointsman.yaml"
NAMED_TEST = re.compile(r"`(?:(?P<file>[\w/…]+\.py)::)?(?P<test>test_[a-z0-9_]+)`")
TEST_DEFINITION = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)
METRIC = re.compile(r"pointsman_[a-z0-9_]*[a-z0-9]")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, absolute, and the line that imports it."""

    where: str
    line: int
    module: str

    def within(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")

    def __str__(self) -> str:
        return f"{self.where}:{self.line} imports {self.module}"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, those inside functions and type-checking blocks too.

    `from a.b import c` counts as `a.b.c`: whether c is a module cannot be told without importing it, and the rules
    below only ask for prefixes.
    """
    where = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(path.read_text(), str(where))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(str(where), node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = where.parts[: len(where.parts) - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(str(where), node.lineno, f"{base}.{alias.name}")


def of(package: str) -> list[Import]:
    return [one for path in sources(package) for one in imports(path)]


def breaches(found: list[Import]) -> str:
    return "\n".join(map(str, found))


# Import layers


@pytest.mark.parametrize("package", ["indexer", "engine_ext", "gpu_ops"])
def test_nothing_imports_the_router(package: str) -> None:
    assert not breaches([one for one in of(package) if one.within("router")])


def test_the_indexer_stands_alone() -> None:
    assert not breaches([one for one in of("indexer") if one.within("engine_ext") or one.within("gpu_ops")])


def test_the_engine_extension_knows_of_the_indexer_only_names_and_wire_format() -> None:
    allowed = ("indexer.identity", "indexer.wire")
    found = [one for one in of("engine_ext") if one.within("indexer") and not any(map(one.within, allowed))]
    assert not breaches(found)


def test_the_kernels_import_no_other_package() -> None:
    assert not breaches([one for one in of("gpu_ops") if any(map(one.within, ("indexer", "engine_ext")))])


def test_the_router_reaches_the_simulator_only_where_something_is_simulated() -> None:
    found = [
        one
        for one in of("router")
        if one.within("gpu_ops")
        or (
            one.within("engine_ext")
            and not (one.within("engine_ext.sim") and one.where.startswith(SIMULATOR_USERS))
        )
    ]
    assert not breaches(found)


def test_engine_libraries_are_imported_only_beside_the_engine() -> None:
    found = [
        one
        for path in sources(*PACKAGES, "tests")
        for one in imports(path)
        if one.module.split(".")[0] in ENGINE_LIBRARIES and not one.where.startswith(ENGINE_LIBRARY_PLACES)
    ]
    assert not breaches(found)


def test_every_test_of_a_layer_rule_has_something_to_look_at() -> None:
    for package in ("router", "indexer", "engine_ext"):
        assert any(one.within(package) for one in of(package)), package


# The distribution


def installed() -> metadata.Distribution:
    """The installed distribution with its file list. An editable install has none worth looking at."""
    strict = os.environ.get("POINTSMAN_CI") == "1"
    command = "pip install '.[test]'"
    try:
        distribution = metadata.distribution("pointsman")
    except metadata.PackageNotFoundError:
        if strict:
            raise
        pytest.skip(f"pointsman is not installed; install it with: {command}")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") and not strict:
        pytest.skip(f"pointsman is installed editable; install it with: {command}")
    return distribution


def test_the_wheel_contains_the_four_packages_and_nothing_else() -> None:
    files = [
        file for file in installed().files or [] if ".." not in file.parts and "__pycache__" not in file.parts
    ]
    top = {file.parts[0] for file in files}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert len([name for name in top if name.endswith(".dist-info")]) == 1
    assert not [
        str(file)
        for file in files
        if {"native", "tests", "charts"} & set(file.parts) and file.suffix == ".cpp"
    ]


def test_no_base_dependency_belongs_to_an_engine() -> None:
    required = [line for line in installed().requires or [] if "extra ==" not in line]
    named = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in required}
    assert named
    assert not named & (ENGINE_LIBRARIES | {"numpy"})


# Files


def licensed_files() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests", ".ci")]
    found = [p for folder in folders for p in folder.rglob("*") if p.suffix in LICENSED_SUFFIXES]
    return sorted([*found, ROOT / ".ci/run", *(ROOT / "indexer/native").rglob("CMakeLists.txt")])


def test_every_source_file_names_its_licence_first() -> None:
    unmarked = []
    for path in licensed_files():
        lines = path.read_text().splitlines()[:2]
        first = lines[1:] if lines and lines[0].startswith("#!") else lines[:1]
        if lines and not any(map(SPDX.match, first)):
            unmarked.append(str(path.relative_to(ROOT)))
    assert not unmarked


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_architecture_page(package: str) -> None:
    page = ROOT / package / "README.md"
    assert page.is_file()
    assert len(page.read_text().split()) > 40, "a page, not a placeholder"


# Documents


def documented_configurations() -> list[tuple[str, str]]:
    """YAML blocks of our pages whose first line begins with the mark of a configuration file."""
    pages = [ROOT / "README.md", *(ROOT / package / "README.md" for package in PACKAGES)]
    return [
        (str(page.relative_to(ROOT)), block)
        for page in pages
        if page.exists()
        for block in YAML_BLOCK.findall(page.read_text())
        if block.startswith(CONFIGURATION_MARK)
    ]


def test_every_documented_configuration_loads(tmp_path: Path) -> None:
    from router import config

    blocks = documented_configurations()
    assert blocks, f"no page shows a configuration (a yaml block whose first line is {CONFIGURATION_MARK!r})"
    for number, (page, block) in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        try:
            config.load(file, environ={"HOME": str(tmp_path)})
        except Exception as error:
            pytest.fail(f"a configuration in {page} does not load: {error}\n{block}")


def test_every_test_that_a_page_names_exists() -> None:
    """Named as `PATH::test` or `test` alone; a path may begin below ``tests`` or leave folders out as `…`."""
    tests = {str(path): set(TEST_DEFINITION.findall(path.read_text())) for path in sources("tests")}
    named, missing = 0, []
    for page in sorted(page for package in PACKAGES for page in (ROOT / package).rglob("README.md")):
        for found in NAMED_TEST.finditer(page.read_text()):
            ending = "/" + (found["file"] or "").split("…/")[-1].removeprefix("tests/")
            named += 1
            if not any(
                found["test"] in names and (found["file"] is None or path.endswith(ending))
                for path, names in tests.items()
            ):
                missing.append(f"{page.relative_to(ROOT)}: {found[0]}")
    assert not missing
    assert named > 60


def metrics_in_code() -> set[str]:
    """Metric names among the router's string constants, and those that its registry holds from the start."""
    from router.metrics import RouterMetrics

    constants = {
        node.value
        for path in sources("router")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value)
    }
    return {base_name(name) for name in constants | {m.name for m in RouterMetrics().registry.collect()}}


def metrics_in_tables(page: Path) -> set[str]:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return {base_name(name) for row in rows for name in METRIC.findall(row)}


def base_name(metric: str) -> str:
    """Without the suffix that the exposition gives counters; pages may write either."""
    return metric.removesuffix("_total")


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    in_code = metrics_in_code()
    documented = metrics_in_tables(ROOT / "router/README.md")
    assert {"pointsman_decisions", "pointsman_worker_health"} <= in_code
    assert sorted(in_code - documented) == []
    assert sorted(documented - in_code) == []


def test_configuration_reference_of_the_router_page_is_the_code_s() -> None:
    from router.config import Config
    from router.config_schema import reference_table, render_reference

    assert render_reference(reference_table(Config)) in (ROOT / "router/README.md").read_text()
